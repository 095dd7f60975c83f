"""The command line: serve, plan, chat, check-backend, and what they share."""
