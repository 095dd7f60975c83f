"""Prometheus metrics: the registry, stages, caches and buckets."""
