"""What one HTTP request did: its record, the lines that the log has of it, and its trace."""
