"""What a run looks like now: read from the server, put in words, drawn."""
