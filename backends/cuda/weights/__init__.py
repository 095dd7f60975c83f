"""Weights as a card keeps them; torch alone, so that the twin of a card and the tests read them too."""
