"""Tool calls: the parsers that find them in an answer, one for each format of models."""
