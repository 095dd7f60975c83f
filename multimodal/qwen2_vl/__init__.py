"""Qwen2-VL: the model, its tower, and the processor, positions and packing that later models of its line share."""
