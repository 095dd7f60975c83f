"""The engine process as the server sees it: client, supervisor, spawning."""
