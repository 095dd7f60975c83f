"""LLaVA-NeXT (LLaVA-1.6): CLIP's tower over tiles of a picture, whose lines stand beside each other in the prompt."""
