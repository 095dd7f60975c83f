"""The ASGI application: listening, the gate in front of it, and how its parts are wired."""
