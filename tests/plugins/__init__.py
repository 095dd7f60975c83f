"""Plug-ins of pytest that the tests load."""
