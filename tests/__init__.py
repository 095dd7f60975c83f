"""The tests, and the packages that they share."""
