"""Captured graphs: the manager, capture and warm-up, misses, failures and the journal of captures."""
