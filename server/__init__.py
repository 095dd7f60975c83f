"""The command line, the OpenAI API and the processes behind it."""
