"""Model definitions, each written once for all backends, with the checkpoint names that they map."""
