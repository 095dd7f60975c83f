"""MiniCPM-V 4.6: slices of an image, a merger in the middle of the tower, and Qwen3.5's decoder."""
