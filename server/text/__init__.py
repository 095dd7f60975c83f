"""Tokenizer, chat template, detokenizer and stop strings: the text side, free of FastAPI and torch."""
