"""A strict Gaudi in software: what a device refuses is refused, what it would get wrong comes out wrong."""
