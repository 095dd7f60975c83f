"""LLaVA-1.5: a Llama that sees through a CLIP tower and two linear layers."""
