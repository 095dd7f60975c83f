"""Finds a model's format of reasoning: by name, by its chat template, or in another package."""

from __future__ import annotations

from importlib.metadata import entry_points

from trencadis.core.errors import StartupError
from trencadis.core.old_names import find_successors
from trencadis.server.tools.gemma4_parser import GEMMA4
from trencadis.server.tools.harmony_parser import CHANNEL, HARMONY
from trencadis.server.tools.reasoning_parser import THINK, ReasoningFormat

REASONING_GROUP = "trencadis.reasoning_parsers"
"""Entry-point group in which an installed package offers a ``ReasoningFormat``."""


REASONING_FORMATS = {
    "qwen3": THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "openai_gptoss": HARMONY,
    "gemma4": GEMMA4,
}


KNOWN = (THINK, ReasoningFormat("[THINK]", "[/THINK]"), ReasoningFormat("<thought>", "</thought>"), GEMMA4)
"""Pairs of tags that are searched for in a template."""


def find_reasoning_format(asked: str, template: str | None) -> ReasoningFormat | None:
    """Returns the format that ``--reasoning-parser`` names; ``auto``: the one that the template contains, if any.

    Raises:
        StartupError: there is no such parser.
    """
    if asked == "none":
        return None
    if asked == "auto" and template is not None and CHANNEL in template:
        return HARMONY
    if asked == "auto":
        return next((form for form in KNOWN if template is not None and form.end in template), None)
    if asked in REASONING_FORMATS:
        return REASONING_FORMATS[asked]
    start, comma, end = (part.strip() for part in asked.partition(","))
    if comma and start and end and start != end:
        return ReasoningFormat(start, end)
    offered = {e.name: e for e in entry_points(group=REASONING_GROUP)}
    if asked not in offered:
        names = ", ".join(["auto", "none", *REASONING_FORMATS, *sorted(offered)])
        raise StartupError(f"--reasoning-parser {asked[:60]}: use {names}, or two tags as in '<think>,</think>'.")
    try:
        form = offered[asked].load()
    except Exception as error:
        failed = f"--reasoning-parser {asked}: its package failed: {str(error)[:120]}"
        raise StartupError(failed + find_successors(error)) from None
    if not isinstance(form, ReasoningFormat):
        raise StartupError(f"--reasoning-parser {asked}: its entry point must be a ReasoningFormat.")
    return form
