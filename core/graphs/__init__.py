"""Captured graphs: manager, capture, warm-up, miss reasons, out-of-memory handling and the journal of captures."""
