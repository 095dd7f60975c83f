"""Qwen3-VL, dense and with experts: positions between those of a table, rows of several parts, times as text."""
