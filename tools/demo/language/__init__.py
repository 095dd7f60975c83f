"""The language of the demo: phrasings, questions, small talk, and the tokenizer."""
