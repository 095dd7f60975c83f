"""Decides which tokens run next: scheduler, sequences and their life cycle, image encoding and pixels."""
