"""SmolVLM2, which is Idefics3 under another name."""
