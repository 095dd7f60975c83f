"""The engine process: its loop, message format, child processes, heap and logging."""
