"""Model definitions, written once over ops, with the checkpoint names they map."""
