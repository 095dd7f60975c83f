"""Stand-ins for packages that are not installed, and a container that has them."""
