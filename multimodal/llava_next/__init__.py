"""LLaVA-NeXT (LLaVA-1.6): CLIP's tower over tiles of an image, whose lines stand beside each other in the prompt."""
