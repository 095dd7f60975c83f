"""From a configuration to a ready engine, on a device or on paper."""
