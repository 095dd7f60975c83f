"""What is right: transformers, qwen-vl-utils, float64 references and shadow models."""
