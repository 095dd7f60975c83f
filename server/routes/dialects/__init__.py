"""Routes of other APIs than OpenAI's completions; each runs a chat request and says its answer in its own way."""
