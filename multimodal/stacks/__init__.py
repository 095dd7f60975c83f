"""A tower of two stacks over all tiles of a picture at once, whose rows a decoder attends to."""
