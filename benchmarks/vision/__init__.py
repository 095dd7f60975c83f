"""Vision families on the CPU against transformers: the encoder, and the time to the first token."""
