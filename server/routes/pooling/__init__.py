"""The pooling routes, one file each, and what they share."""
