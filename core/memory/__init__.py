"""Device memory: the ledger, estimates, measurements and the graph budget."""
