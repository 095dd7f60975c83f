"""Qwen2.5-VL: the model, its vision tower, packing, rotary positions and placeholders."""
