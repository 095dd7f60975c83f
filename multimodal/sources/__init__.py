"""Where media come from: data URLs, files, and http(s) to public addresses."""
