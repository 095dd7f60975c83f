"""From an OpenAI request to engine requests and back: templates, media parts, parameters, text."""
