"""Experiments: arms against one another, over regimes and seeds, each cell a whole run in lockstep."""
