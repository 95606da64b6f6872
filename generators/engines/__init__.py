"""Engines turn questions into completions. Each is one file; `generators.engines.base` says what they share."""
