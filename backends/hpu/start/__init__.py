"""Finds and opens a Gaudi: the environment, the installed plug-in, the emulator."""
