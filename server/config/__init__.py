"""Flags, environment variables and YAML files, and the configuration that results."""
