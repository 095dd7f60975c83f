"""Weights in the form in which a card stores them; needs torch only, so that the twin and the tests can use it."""
