"""Serving: the event loop of `serve`, in one process or over several API processes."""
