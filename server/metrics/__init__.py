"""What a server reports: Prometheus metrics, and the log lines and traces of requests."""
