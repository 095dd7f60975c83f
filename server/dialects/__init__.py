"""Other APIs over one inner request: what they say becomes a chat request, and its answer is said their way."""
