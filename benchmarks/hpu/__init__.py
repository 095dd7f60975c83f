"""What is open about a Gaudi, measured in one run."""
