"""Speculation: guesses of the next tokens, which a step verifies together with the last known token. Torch-free."""
