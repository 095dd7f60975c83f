"""Tests that hold for every family that sees, in the same words."""
