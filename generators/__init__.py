"""Generators: orders in, raw groups out."""
