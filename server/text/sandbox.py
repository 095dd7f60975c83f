"""The jinja2 environment of chat templates: sandboxed, and bounded in loops, repetition and output."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trencadis.core.errors import BadRequest

MAX_OUTPUT = 16 << 20
"""Characters of one rendered conversation."""
MAX_LOOPS = 200_000
"""Loop rounds of one rendering, all loops together."""
MAX_REPEAT = 1 << 20
"""Length of a value that ``*`` makes of a string or list."""
TICK = "_loop_tick"


class Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a trainer learns from; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget: every loop round calls the rendering's ``TICK``."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Products and powers, refused where they would build something huge."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and numbers and (abs(left) > 1 << 16 or abs(right) > 64):
            raise jinja2.TemplateRuntimeError("number too large")
        if operator == "*" and not numbers:
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if isinstance(times, int) and len(sized) * times > MAX_REPEAT:
                raise jinja2.TemplateRuntimeError("repetition too long")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        for loop in source.find_all(nodes.For):
            tick = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
        return super()._generate(source, *args, **kwargs)


def environment() -> Sandbox:
    """An environment with the filters and globals that chat templates of the hub rely on."""
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The rendered text.

    Raises:
        BadRequest: the template refuses the conversation, fails on it, or exceeds its budget.
    """
    try:
        return "".join(_bounded(template.generate({**values, TICK: _ticker()})))
    except _RefusedError as error:
        raise BadRequest(str(error) or "The chat template refuses this conversation.", param="messages") from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise BadRequest(f"The chat template cannot render this conversation: {text}"[:190], param="messages") from None
    except RecursionError:
        raise BadRequest("The chat template recurses too deeply.", param="messages") from None


class _RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise(message: object) -> None:
    raise _RefusedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _ticker() -> Callable[[], None]:
    left = MAX_LOOPS

    def tick() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise jinja2.TemplateRuntimeError("too many loop rounds")

    return tick


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    left = MAX_OUTPUT
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise jinja2.TemplateRuntimeError("output too long")
        yield piece
