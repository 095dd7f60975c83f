"""Idefics3: tiles of a picture, each behind a token of its row and column, and the whole picture behind them."""
