"""Converts the requested form of an answer to one grammar: schemas, regexes, users' grammars, tags."""
