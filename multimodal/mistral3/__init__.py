"""Mistral Small 3.1 and 3.2: Mistral's decoder, and Pixtral's tower with merged cells of 2 x 2 patches."""
