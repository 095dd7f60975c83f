"""The processes of a server: who starts and joins engines and API processes, and which engine runs a request."""
