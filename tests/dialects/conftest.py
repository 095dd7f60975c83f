"""The scripted application of the tool tests, and the same behind a real server."""

from __future__ import annotations

from tests.calls.conftest import serve, tagged

__all__ = ["serve", "tagged"]
