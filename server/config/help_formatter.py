"""Texts of ``--help``, ``--help=all``, ``--help=FLAG`` and ``--help=server|engine|legacy``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from trencadis.core.errors import StartupError
from trencadis.server.config.flag_table_and_lookup import Flag, find_flag, get_flag_table
from trencadis.server.config.vllm_flag_and_env_table import ROWS
from trencadis.server.config.vllm_flag_row_and_value_conversion import FREE, MEANS, REFUSED, FlagRow

USAGE = """\
usage: trencadis serve [MODEL] [--flag value ...]

Serves MODEL (a checkpoint folder or a hub id; none: the bundled demo) behind an OpenAI API.
Flags take - or _, unambiguous prefixes work, booleans have --no-x, numbers may be 4k (4000), 4K (4096) or 256MiB.
--config FILE.yaml reads flags from a file. More: --help=all, --help=FLAG, --help=server, --help=engine, --help=legacy.
"""
GROUPS = {"server": "HTTP server", "engine": "Engine and model"}


def make_help_text(topic: str = "") -> str:
    """Returns the text that ``--help=topic`` prints.

    Raises:
        StartupError: there is no such topic.
    """
    low = topic.lower()
    if low in GROUPS:
        return _format_group(low, hidden=False)
    if low == "legacy":
        return _format_vllm_flags()
    if topic and low != "all":
        found = find_flag("--" + topic.lstrip("-"))
        if found.flag is not None:
            return _format_flag(found.flag)
        if found.name in ROWS:
            return _describe_vllm_flag(ROWS[found.name])
        raise StartupError(f"--help={topic}: see --help.")
    parts = [USAGE, *(_format_group(group, hidden=low == "all") for group in GROUPS)]
    if low == "all":
        parts.append(_format_vllm_flags())
    return "\n".join(parts)


def _format_group(owner: str, hidden: bool) -> str:
    flags = [f for f in get_flag_table().values() if f.owner == owner and (hidden or not f.hidden)]
    return f"{GROUPS[owner]}:\n" + "".join(_format_flag(f) for f in flags)


def _format_flag(flag: Flag) -> str:
    name = flag.written
    if flag.kind == "bool":
        name = f"--[no-]{flag.written[2:]}"
    else:
        name += " " + ("{" + ",".join(flag.choices) + "}" if flag.choices else flag.kind.upper())
    short = [a for a in flag.aliases if len(a) <= 2]
    name = f"-{short[0]}, {name}" if short else name
    shown = "" if flag.default in (None, "", [], {}, False) else f" [{flag.default}]"
    env = f" (environment: {', '.join(flag.env)})" if flag.env else ""
    body = textwrap.wrap(flag.help + shown + env, 80)
    if len(name) < 34:
        first, rest = f"  {name:<34}{body[0]}\n", body[1:]
    else:
        first, rest = f"  {name}\n", body
    return first + "".join(f"{'':36}{line}\n" for line in rest)


TITLES = {
    MEANS: "Flags of vLLM that flags of ours do",
    FREE: "Accepted without effect (no answer and no limit depends on them)",
    REFUSED: "Refused, except for values that describe what happens anyway",
}


def _describe_vllm_flag(row: FlagRow) -> str:
    """Returns what a flag of vLLM does here."""
    verdict = {MEANS: "means", FREE: "has no effect here:", REFUSED: "is refused here:"}[row.verdict]
    return textwrap.fill(f"{row.written} {verdict} {row.why}.", 116, break_on_hyphens=False) + "\n"


def _format_vllm_flags() -> str:
    def names(rows: Iterable[FlagRow]) -> str:
        joined = ", ".join(sorted(row.written for row in rows))
        return textwrap.fill(joined, 116, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)

    parts = [f"{title}:\n{names(r for r in ROWS.values() if r.verdict == v)}\n" for v, title in TITLES.items()]
    return "\n".join([*parts, "--help=FLAG says more about one of them.\n"])
