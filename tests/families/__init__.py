"""The text families: small checkpoints of each, held to transformers."""
