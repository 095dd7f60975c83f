"""Requests, chats and clips, and the servers that they are sent to."""
