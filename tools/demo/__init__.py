"""Draws images, asks about them, and trains the bundled demo checkpoint on the answers."""
