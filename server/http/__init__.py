"""The ASGI application: listening, the middleware in front of it, and how its parts are wired."""
