"""Sources of media: data URLs, files, and http(s) to public addresses."""
