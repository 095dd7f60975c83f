"""vLLM's flags and variables that this server does not share: what each of them does here, one row per name."""
