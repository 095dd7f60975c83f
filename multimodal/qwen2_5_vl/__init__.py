"""Qwen2.5-VL: the family, the model, and packing into windows."""
