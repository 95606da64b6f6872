"""The starter model: tokenizer, warm-up and folder of a tiny model for trying things out."""
