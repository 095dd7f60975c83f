"""The emulated recipe cache: its variable, and recipes kept on disk."""
