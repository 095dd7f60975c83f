"""The jinja2 environment of chat templates: sandboxed, and bounded in loops, repetition and output."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import do_replace
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trencadis.core.errors import BadRequest

MAX_OUTPUT = 16 << 20
"""Most characters of a rendered conversation."""
MAX_LOOPS = 200_000
"""Most iterations of one rendering, all loops together."""
MAX_REPEAT = 1 << 20
"""Most items of a string or list that ``*`` makes."""
TICK = "_loop_tick"
PLAIN = "_plain"
FAILURES = (
    jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError
)  # fmt: skip
"""Exceptions that a template or its conversation may cause."""
SEARCHES = frozenset({
    "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex", "count",
    "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace",
})  # fmt: skip
"""Methods of a text that search it for their first argument."""


class GenerationTag(jinja2.ext.Extension):
    """Ignores ``{% generation %}...{% endgeneration %}``, which marks text for training, and keeps its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns the statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget: every iteration of a loop calls the rendering's ``TICK``.

    The template's own tokens are marks, while texts of users hold tokens as typed. So comparisons drop the marks, and a
    search that does not find a mark searches for the token.

    Args:
        nonce: part of every mark.
        unmark: returns the readable form of a text with marks.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, nonce: str, unmark: Callable[[str], str], **options: Any) -> None:
        super().__init__(**options)
        self._nonce = nonce
        self._unmark = unmark
        self.filters[PLAIN] = self._plain
        self.filters["replace"] = self._replace

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call of the template; the argument of a text search is converted to the form in the text."""
        text = getattr(function, "__self__", None)
        if args and isinstance(text, str) and function.__name__ in SEARCHES:
            args = (self._as_in(text, args[0]), *args[1:])
        return super().call(context, function, *args, **kwargs)

    def _as_in(self, text: str, wanted: Any) -> Any:
        return self._plain(wanted) if isinstance(wanted, str) and wanted not in text else wanted

    def _plain(self, value: Any) -> Any:
        """Removes marks from a text, or a list of texts."""
        if isinstance(value, str):
            return self._unmark(value) if self._nonce in value else value
        return [self._plain(v) for v in value] if isinstance(value, list | tuple) else value

    @jinja2.pass_eval_context
    def _replace(self, context: nodes.EvalContext, text: str, old: str, new: str, count: int | None = None) -> str:
        return do_replace(context, text, self._as_in(str(text), old), new, count)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes products and powers; refuses those with a huge result."""
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
        found: list[nodes.Compare | nodes.Test] = [*source.find_all(nodes.Compare), *source.find_all(nodes.Test)]
        for compared in found:
            if self._has_marks(compared):
                self._without_marks(compared)
        return super()._generate(source, *args, **kwargs)

    def _has_marks(self, node: nodes.Node) -> bool:
        """Returns True if a comparison may involve a mark: a constant of the template, or ``eos_token`` and the
        like.
        """
        return any(isinstance(c.value, str) and self._nonce in c.value for c in node.find_all(nodes.Const)) or any(
            n.name.endswith("_token") for n in node.find_all(nodes.Name)
        )

    def _without_marks(self, node: nodes.Compare | nodes.Test) -> None:
        def plain(expr: nodes.Expr) -> nodes.Expr:
            made = nodes.Filter(expr, PLAIN, [], [], None, None)
            made.set_lineno(node.lineno)
            return made

        if isinstance(node, nodes.Compare):
            node.expr = plain(node.expr)
            for operand in node.ops:
                operand.expr = plain(operand.expr)
        else:
            node.node, node.args = plain(node.node), [plain(arg) for arg in node.args]


def make_environment(nonce: str, unmark: Callable[[str], str]) -> TemplateSandbox:
    """Makes a sandbox with the filters and globals that chat templates on the Hugging Face Hub use."""
    extensions = [GenerationTag, jinja2.ext.loopcontrols]
    env = TemplateSandbox(nonce, unmark, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Returns the rendered text.

    Raises:
        BadRequest: the template refuses the conversation, fails on it, or exceeds its budget.
    """
    try:
        return "".join(_limit_output(template.generate({**values, TICK: _make_loop_counter()})))
    except FAILURES as error:
        raise BadRequest(_describe_template_error(error), param="messages") from None


def _describe_template_error(error: Exception) -> str:
    """Returns the client's error message for a template that failed."""
    if isinstance(error, RecursionError):
        return "The chat template recurses too deeply."
    if isinstance(error, _RefusedError):
        return str(error) or "The chat template refuses this conversation."
    return f"The chat template cannot render this conversation: {' '.join(str(error).split())}"[:190]


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
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_loop_counter() -> Callable[[], None]:
    left = MAX_LOOPS

    def tick() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise jinja2.TemplateRuntimeError("too many loop iterations")

    return tick


def _limit_output(pieces: Iterator[str]) -> Iterator[str]:
    left = MAX_OUTPUT
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise jinja2.TemplateRuntimeError("output too long")
        yield piece
