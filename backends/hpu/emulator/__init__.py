"""A strict Gaudi in software: it refuses what a device refuses, and computes wrong where a device would."""
