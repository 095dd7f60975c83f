"""The record of an HTTP request, its log lines, and its trace."""
