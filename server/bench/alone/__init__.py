"""Benchmarks of an engine alone, without a server: throughput, latency, start-up."""
