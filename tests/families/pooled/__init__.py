"""Models that pool, each against transformers."""
