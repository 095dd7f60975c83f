"""Tokenizer, chat template, detokenizer and stop strings. Imports neither FastAPI nor torch."""
