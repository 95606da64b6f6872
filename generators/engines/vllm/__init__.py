"""The vLLM engine. Nothing here imports vLLM before an engine is made."""
