"""The engine process: its loop, the wire format, child processes, heap and logging."""
