"""A run over several machines: invitations, the accounts of guests, taking part."""
