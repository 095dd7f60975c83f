"""Routes of other APIs than OpenAI's completions; each runs a chat request and writes its answer in its own form."""
