"""Builds an engine from a configuration, or plans it without a device."""
