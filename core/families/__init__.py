"""The built-in text model families, one ``core.models.family.Family`` record each. Torch-free."""
