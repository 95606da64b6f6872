"""Where every claim about speed comes from."""
