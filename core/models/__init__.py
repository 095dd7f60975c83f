"""Model definitions, each written once for all backends, with their mapping of checkpoint names."""
