"""The emulated recipe cache: its variable, and the recipes stored on disk."""
