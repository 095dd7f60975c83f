"""vLLM's flags and variables that are none of ours: what each of them does here, one row a name."""
