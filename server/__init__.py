"""The command line, the OpenAI API and the server's processes."""
