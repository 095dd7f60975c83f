"""The server's side of an engine process: client, supervisor, spawning."""
