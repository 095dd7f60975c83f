"""Finds the parser of a model's tool calls and its format of reasoning: by name, by its chat template, or in another
package.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points

from trencadis.core.errors import StartupError
from trencadis.core.renamed_plugin_api_error_hints import find_old_members, find_successors
from trencadis.server.tools.gemma4_parser_and_call_grammar import GEMMA4, Gemma4ToolParser
from trencadis.server.tools.harmony_parser import CHANNEL, HARMONY, HarmonyToolParser
from trencadis.server.tools.json_tool_parsers import HermesToolParser, Llama3ToolParser, MistralToolParser
from trencadis.server.tools.pythonic_tool_parser import Lfm2ToolParser, PythonicToolParser
from trencadis.server.tools.qwen3_tool_parser import Qwen3ToolParser
from trencadis.server.tools.reasoning_parser import THINK, ReasoningFormat
from trencadis.server.tools.tool_parser import ToolParser

TOOL_GROUP = "trencadis.tool_parsers"
"""Entry-point group in which an installed package offers a subclass of ``ToolParser``."""
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen3": Qwen3ToolParser,
    "llama3_json": Llama3ToolParser,
    "mistral": MistralToolParser,
    "pythonic": PythonicToolParser,
    "lfm2": Lfm2ToolParser,
    "openai": HarmonyToolParser,
    "gemma4": Gemma4ToolParser,
}
ALIASES = {
    "qwen3_xml": "qwen3",
    "qwen3_coder": "qwen3",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
"""Names of vLLM's parsers for the same forms."""
SIGNS: tuple[tuple[re.Pattern[str], type[ToolParser]], ...] = (
    (re.compile(r"<\|channel\|>"), HarmonyToolParser),
    (re.compile(r"<\|tool_call>"), Gemma4ToolParser),
    (re.compile(r"\[TOOL_CALLS\]"), MistralToolParser),
    (re.compile(r"<function="), Qwen3ToolParser),
    (re.compile(r"<tool_call>"), HermesToolParser),
    (re.compile(r"<\|tool_(call|list)_start\|>"), Lfm2ToolParser),
    (re.compile(r"\[\w+\(\w+="), PythonicToolParser),
    (re.compile(r"<\|python_tag\|>|\bipython\b"), Llama3ToolParser),
)
"""Patterns that the template of a model with a call format contains; the first match counts."""


def find_tool_parser(asked: str, template: str | None) -> type[ToolParser] | None:
    """Returns the parser that ``--tool-call-parser`` names; ``auto``: the parser of the format in the template, if
    there is one.

    Raises:
        StartupError: there is no such parser, or its package failed.
    """
    if asked == "auto":
        return None if template is None else detect_tool_parser(template)
    name = ALIASES.get(asked, asked)
    if name in TOOL_PARSERS:
        return TOOL_PARSERS[name]
    offered = {e.name: e for e in entry_points(group=TOOL_GROUP)}
    if name not in offered:
        names = ", ".join(["auto", *TOOL_PARSERS, *sorted(offered)])
        raise StartupError(f"--tool-call-parser {asked[:60]} is none of {names}.")
    try:
        found = offered[name].load()
    except Exception as error:
        failed = f"--tool-call-parser {name}: its package failed: {str(error)[:120]}"
        raise StartupError(failed + find_successors(error)) from None
    if not (isinstance(found, type) and issubclass(found, ToolParser)):
        raise StartupError(f"--tool-call-parser {name}: its entry point must be a subclass of ToolParser.")
    if renamed := find_old_members(found):
        raise StartupError(f"--tool-call-parser {name}: {found.__name__} has members of an older version{renamed}")
    return found


def detect_tool_parser(template: str) -> type[ToolParser] | None:
    """Returns the parser of the format that a template's text shows; None for a template that does not take tools."""
    if "tools" not in template:
        return None
    return next((parser for sign, parser in SIGNS if sign.search(template)), None)


REASONING_GROUP = "trencadis.reasoning_parsers"
"""Entry-point group in which an installed package offers a ``ReasoningFormat``."""


REASONING_FORMATS = {
    "qwen3": THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "openai_gptoss": HARMONY,
    "gemma4": GEMMA4,
}


KNOWN_TAGS = (THINK, ReasoningFormat("[THINK]", "[/THINK]"), ReasoningFormat("<thought>", "</thought>"), GEMMA4)
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
        return next((form for form in KNOWN_TAGS if template is not None and form.end in template), None)
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
