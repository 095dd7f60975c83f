"""The Gaudi backend (not built yet)."""
