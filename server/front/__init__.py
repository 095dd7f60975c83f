"""Several API processes over one engine: the front that starts them, their link to it, and what they count together."""
