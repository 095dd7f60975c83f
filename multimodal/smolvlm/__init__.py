"""SmolVLM2: Idefics3 under another name."""
