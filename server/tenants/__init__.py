"""The tenants of requests, their limits, and their use."""
