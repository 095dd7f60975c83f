"""Routes that vLLM has beside OpenAI's: several conversations at a time, the tokenizer, load, development."""
