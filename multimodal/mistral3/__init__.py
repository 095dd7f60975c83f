"""Mistral Small 3.1 and 3.2: Mistral's decoder, and Pixtral's tower whose cells of 2 x 2 patches are merged."""
