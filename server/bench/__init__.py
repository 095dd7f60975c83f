"""``trencadis bench``: load on a running server, throughput and latency of an engine in this process, start-up."""
