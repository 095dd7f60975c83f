"""Simulates a fleet of replicas behind the product's router: ``python -m benchmarks.fleet``."""
