"""Qwen3-VL, dense and with experts: interpolated position embeddings, DeepStack rows of several parts, timestamps
as text.
"""
