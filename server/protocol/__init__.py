"""Request and response bodies of the OpenAI API."""
