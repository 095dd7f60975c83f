"""Idefics3: tiles of an image, each behind a token of its row and column, and the whole image behind them."""
