"""The text families that are built in, one record each: ``core.models.family.Family``. Torch-free."""
