"""What requests may use: admission, the keys of tenants, their limits, and counters that all API processes share."""
