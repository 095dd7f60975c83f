"""The command line and the environment as settings, in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trencadis.server.config.command_line_parser import parse
from trencadis.server.config.resolve_settings import Settings, resolve_settings


def from_command_line(words: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """What ``serve`` makes of ``words``."""
    return resolve_settings(parse(words), environ)
