"""Speed of model families against transformers."""
