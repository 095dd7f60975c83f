"""Ranks on a Ray cluster: Ray places, starts and ends them; no Step passes it. Only ``ray`` asked for imports it."""
