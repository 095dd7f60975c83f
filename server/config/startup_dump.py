"""The start-up dump: every value that differs from its default, and its source."""

from __future__ import annotations

from collections.abc import Iterator

from trencadis.server.config.flags import get_flag_table
from trencadis.server.config.resolve_settings import Settings

MASK = "****"


def format_lines(settings: Settings) -> Iterator[str]:
    """Yields one line for each value that the user chose or that differs from its default; secrets are masked."""
    for flag in get_flag_table().values():
        value = getattr(settings.engine if flag.owner == "engine" else settings.server, flag.name)
        source = settings.sources.get(flag.name)
        if value == flag.default and source is None:
            continue
        shown = MASK if flag.secret and value else repr(value)
        yield f"{flag.name} = {shown} ({source or 'derived'})"
    for name, value in settings.shapes.items():
        yield f"{name} = {value!r} (environment)"
