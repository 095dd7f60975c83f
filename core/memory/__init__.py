"""Where a device's bytes go: the ledger, estimates, measurements and the graph budget."""
