"""What the host costs: CPU of a decode step, of a streamed token."""
