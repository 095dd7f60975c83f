"""Flags, variables and YAML files, and the configuration that they become."""
