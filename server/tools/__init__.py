"""Parsers that find tool calls and reasoning in an answer, one for each format of models."""
