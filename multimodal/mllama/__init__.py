"""Llama-3.2-Vision: a Llama some of whose layers attend to images, and a tower of two stacks over four tiles."""
