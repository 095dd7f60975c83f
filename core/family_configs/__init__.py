"""The built-in text model families, one ``core.checkpoint.family.Family`` record each. Torch-free."""
