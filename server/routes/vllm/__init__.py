"""Routes that vLLM has in addition to OpenAI's: several conversations at a time, the tokenizer, load, development."""
