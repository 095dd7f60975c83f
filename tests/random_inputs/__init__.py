"""Texts, schemas and grammars at random, for tests of grammars."""
