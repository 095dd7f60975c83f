"""Masks of the ids that a choice may sample next: rules, and the matchers that follow a choice's tokens."""
