"""Streams of events: how pieces of text become bytes, each API in its own words."""
