"""The server as an application of Ray Serve: ``serve run trencadis.ray_serve:build model=NAME``."""

from trencadis.ray_serve.application import build

__all__ = ["build"]
