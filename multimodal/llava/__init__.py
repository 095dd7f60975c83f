"""LLaVA-1.5: a Llama decoder with CLIP's vision tower and a projector of two linear layers."""
