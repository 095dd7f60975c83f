"""Which form of calls a model writes: by name, by its chat template, or by another package."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

from trencadis.core.errors import StartupError
from trencadis.server.tools.hermes import HermesParser
from trencadis.server.tools.llama3 import Llama3Parser
from trencadis.server.tools.mistral import MistralParser
from trencadis.server.tools.parser import ToolParser
from trencadis.server.tools.pythonic import PythonicParser
from trencadis.server.tools.qwen3 import Qwen3Parser

GROUP = "trencadis.tool_parsers"
"""Entry-point group in which an installed package offers a subclass of ``ToolParser``."""
BUILT: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3": Qwen3Parser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
ALIASES = {
    "qwen3_xml": "qwen3",
    "qwen3_coder": "qwen3",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
"""Names of vLLM's parsers for the same forms."""
SIGNS: tuple[tuple[re.Pattern[str], type[ToolParser]], ...] = (
    (re.compile(r"\[TOOL_CALLS\]"), MistralParser),
    (re.compile(r"<function="), Qwen3Parser),
    (re.compile(r"<tool_call>"), HermesParser),
    (re.compile(r"\[\w+\(\w+="), PythonicParser),
    (re.compile(r"<\|python_tag\|>|\bipython\b"), Llama3Parser),
)
"""What the template of a model that writes a form contains; the first that is found counts."""


def tool_form(asked: str, template: str | None) -> type[ToolParser] | None:
    """The parser that ``--tool-call-parser`` names; ``auto``: that of the form in the template, if there is one.

    Raises:
        StartupError: there is no such parser, or its package failed.
    """
    if asked == "auto":
        return None if template is None else of_template(template)
    name = ALIASES.get(asked, asked)
    if name in BUILT:
        return BUILT[name]
    offered = {e.name: e for e in entry_points(group=GROUP)}
    if name not in offered:
        names = ", ".join(["auto", *BUILT, *sorted(offered)])
        raise StartupError(f"--tool-call-parser {asked[:60]} is none of {names}.")
    try:
        found = offered[name].load()
    except Exception as error:
        raise StartupError(f"--tool-call-parser {name}: its package failed: {str(error)[:120]}") from None
    if not (isinstance(found, type) and issubclass(found, ToolParser)):
        raise StartupError(f"--tool-call-parser {name}: its entry point must be a subclass of ToolParser.")
    return found


def of_template(template: str) -> type[ToolParser] | None:
    """The parser of the form that a template's text shows; None for a template that does not take tools."""
    if "tools" not in template:
        return None
    return next((parser for sign, parser in SIGNS if sign.search(template)), None)
