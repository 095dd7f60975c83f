"""Pixtral and Mistral 3: images of any size; a token ends each row of cells."""
