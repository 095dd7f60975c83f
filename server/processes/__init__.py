"""Several API processes over one engine: the front process that starts them, their links to it, and their shared
counters.
"""
