"""Benchmarks of an engine in this process, without a server: throughput, latency, start-up."""
