"""Other APIs on top of the chat API: their requests are converted to chat requests, and the answers back."""
