"""From what a request wants of an answer's form to one grammar: schemas, regexes, grammars of users, tags."""
