"""Streams of events: turns pieces of text into bytes, in the form of each API."""
