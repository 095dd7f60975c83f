"""Turns OpenAI requests into engine requests and answers into text: templates, media parts, parameters, output."""
