"""The engine: its loop, and its start-up from a configuration, or the plan of one without a device."""
