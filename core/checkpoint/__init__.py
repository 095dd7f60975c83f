"""Readers of a checkpoint's JSON files: typed fields, the model's configuration, its rotary settings."""
