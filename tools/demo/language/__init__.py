"""What is asked and answered: phrasings, questions, turns of talk, and the tokenizer."""
