"""Llama-3.2-Vision: a Llama decoder with cross-attention layers, and a vision tower of two stacks over up to four
tiles.
"""
