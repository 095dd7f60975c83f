"""The jinja2 environment of chat templates: sandboxed, and bounded in loops, repetition and output.

The job of a worker: compiles the template of a request, and renders a conversation.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import do_replace
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import Json, JsonObject

MAX_OUTPUT = 16 << 20
"""Most characters of a rendered conversation."""
MAX_STEPS = 200_000
"""Most iterations of loops and calls of one rendering, together."""
STEP = 1024
"""What one of them costs, in characters that filters and operators make: they share a budget."""
MAX_SOURCE = 1 << 20
"""Most characters of a template."""
MAX_REPEAT = 1 << 20
"""Most items of a string or list that ``*`` makes."""
MAX_WIDTH = 1 << 16
"""Largest number that a filter or a method of a text takes: a width, an indentation, a count."""
MAX_WEIGHT = 64 << 20
"""Most values and characters that a list of a template may hold, at every depth and as often as they stand there."""
MAX_BITS = 4096
"""Most bits of a whole number."""
TICK = "_tick"
CONCAT = "_concat"
PLAIN = "_plain"
WEIGH = "_weigh"
SLOW = frozenset({"wordwrap", "urlize", "striptags", "title", "pprint", "wordcount", "truncate", "forceescape"})
"""Filters that take long for each character."""
FAILURES = (
    jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError
)  # fmt: skip
"""Exceptions that a template or its conversation may cause."""
SEARCHES = frozenset({
    "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex", "count",
    "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace",
})  # fmt: skip
"""Methods of a text that search it for their first argument."""
LONG_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{6}|\*)|\{[^}]*[0-9]{6}|\{[^{}]*:[^{}]*\{")
"""A width in a format that may make a long text."""
T = TypeVar("T")
_LEFT: ContextVar[list[int] | None] = ContextVar("trencadis_template_budget", default=None)
"""The characters that the rendering of this context may still make."""


def spend(cost: int) -> None:
    """Takes ``cost`` characters from the budget of the rendering; does nothing outside of one.

    Raises:
        TemplateRuntimeError: the budget is used up.
    """
    left = _LEFT.get()
    if left is not None:
        left[0] -= cost
        if left[0] < 0:
            raise jinja2.TemplateRuntimeError("it takes too many steps")


def _check_size(size: int) -> None:
    """Takes ``size`` characters from the budget; raises TemplateRuntimeError for more than ``MAX_OUTPUT``."""
    if size > MAX_OUTPUT:
        raise jinja2.TemplateRuntimeError("output too long")
    spend(size)


def _size_of(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | range | dict) else 0


def _weigh(value: T) -> T:
    """Returns ``value``, a list or mapping that a template makes. One that holds itself twice, forty levels deep, is
    small until it is compared, printed or hashed.

    Raises:
        TemplateRuntimeError: written out it would be too large.
    """
    waiting, count, size = list[object]([value]), 0, 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        count += 1
        if count > MAX_REPEAT or size + count > MAX_WEIGHT:
            raise jinja2.TemplateRuntimeError("lists too large")
    spend(count)
    return value


class GenerationTag(jinja2.ext.Extension):
    """Ignores ``{% generation %}...{% endgeneration %}``, which marks text for training, and keeps its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns the statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget: iterations, calls, and characters that operators, methods and filters make count.

    A sandbox of jinja2's bounds neither time nor memory: numbers that are squared, texts that are doubled, wide formats
    and macros that call each other would hold the process.

    The template's own tokens are marks, while texts of users hold tokens as typed. So comparisons drop the marks, and a
    search that does not find a mark searches for the token.

    Args:
        nonce: part of every mark.
        unmark: returns the readable form of a text with marks.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, nonce: str, unmark: Callable[[str], str], **options: Any) -> None:
        super().__init__(**options)
        self._nonce = nonce
        self._unmark = unmark
        self.filters[PLAIN] = self._plain
        self.filters["replace"] = self._replace
        self.filters = {name: _bound_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {TICK: _tick, CONCAT: _concat, WEIGH: _weigh}
        self.globals.pop("lipsum", None)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call of the template; searches of a text use the form that the text has."""
        # jinja2 wraps the format of a text, and leaves other methods as they are.
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if args and isinstance(text, str) and function.__name__ in SEARCHES:
            args = (self._as_in(text, args[0]), *args[1:])
        spend(STEP + _size_of(text))
        if isinstance(text, str):
            _check_method(text, function.__name__, args, kwargs)
        made = super().call(context, function, *args, **kwargs)
        _check_size(_size_of(made) if isinstance(text, str) else 0)
        return _weigh(made) if function is dict else made

    def _as_in(self, text: str, wanted: object) -> Any:
        return self._plain(wanted) if isinstance(wanted, str) and wanted not in text else wanted

    def _plain(self, value: object) -> Any:
        """Removes marks from a text, or a list of texts."""
        if isinstance(value, str):
            return self._unmark(value) if self._nonce in value else value
        return [self._plain(v) for v in value] if isinstance(value, list | tuple) else value

    @jinja2.pass_eval_context
    def _replace(self, context: nodes.EvalContext, text: str, old: str, new: str, count: int | None = None) -> str:
        return do_replace(context, text, self._as_in(str(text), old), new, count)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes products and powers; refuses those with a huge result."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers:
            _check_numbers(operator, left, right)
        elif operator == "*":
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if isinstance(times, int) and len(sized) * times > MAX_REPEAT:
                raise jinja2.TemplateRuntimeError("repetition too long")
        elif operator == "+":
            _check_size(_size_of(left) + _size_of(right))
        elif isinstance(left, str) and LONG_WIDTH.search(left):
            raise jinja2.TemplateRuntimeError("format too wide")
        made = super().call_binop(context, operator, left, right)
        if operator in "*%":
            _check_size(_size_of(made))
        return made

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        source = _ExpressionsBounded().visit(source)
        for loop in source.find_all(nodes.For):
            tick = nodes.Filter(nodes.Const(0), TICK, [], [], None, None)
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
    # Without the optimiser: it would compute constants of a hostile template while that is compiled.
    env = TemplateSandbox(nonce, unmark, trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
    env.filters["tojson"] = _bound_filter("tojson", _to_json)
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def compile_source(environment: jinja2.Environment, marked: str) -> jinja2.Template:
    """Compiles a template whose special tokens are marks.

    Raises:
        StartupError: it is not valid; one line.
    """
    if len(marked) > MAX_SOURCE:
        raise StartupError(f"The chat template is longer than {MAX_SOURCE} characters.")
    try:
        return environment.from_string(marked)
    except (*FAILURES, SyntaxError, MemoryError) as error:  # Python's own compiler refuses what is nested too deeply
        why = "it is nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)
        raise StartupError(f"The chat template is not valid: {' '.join(why.split())[:120]}") from None


def unmark_text(text: str, nonce: str, marks: Mapping[str, str]) -> str:
    """The readable form of a marked text. ``marks``: special token -> mark."""
    if nonce not in text:
        return text
    for special, mark in marks.items():
        text = text.replace(mark, special)
    return text


def render(template: jinja2.Template, values: JsonObject) -> str:
    """Returns the rendered text.

    Raises:
        BadRequest: the template refuses the conversation, fails on it, or exceeds its budget.
    """
    token = _LEFT.set([MAX_STEPS * STEP])
    try:
        return "".join(_limit_output(template.generate(values)))
    except FAILURES as error:
        raise BadRequest(_describe_template_error(error), param="messages") from None
    finally:
        _LEFT.reset(token)


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
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _ExpressionsBounded(NodeTransformer):
    """Replaces ``a ~ b`` by a filter that looks at the lengths first, and passes lists and mappings through one that
    looks at their size. A template cannot give a filter another meaning, as it can a variable."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """``[a, b] | CONCAT``."""
        self.generic_visit(node)
        made = nodes.Filter(nodes.List(node.nodes), CONCAT, [], [], None, None)
        made.set_lineno(node.lineno)
        return made

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        """``[...] | WEIGH``, unless all is constant."""
        self.generic_visit(node)
        return _weigh_items(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """As ``visit_List``; the names to which a statement assigns stay as they are."""
        self.generic_visit(node)
        return _weigh_items(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        """As ``visit_List``."""
        self.generic_visit(node)
        return _weigh_items(node, [one for pair in node.items for one in (pair.key, pair.value)])


def _weigh_items(node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Expr:
    if all(isinstance(one, nodes.Const) for one in items):
        return node
    made = nodes.Filter(node, WEIGH, [], [], None, None)
    made.set_lineno(node.lineno)
    return made


def _tick(value: int) -> int:
    """One iteration of a loop."""
    spend(STEP)
    return value


def _concat(parts: list[object]) -> str:
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _bound_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a bound on the numbers that it takes, and on what it makes."""

    @functools.wraps(function)  # keeps the attribute that says what jinja2 passes first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if given:
            spend(_size_of(given[0]) * (256 if name in SLOW else 1 if isinstance(given[0], str) else 16))
        _check_widths(given[1:], kwargs)
        if name == "format" and given and LONG_WIDTH.search(str(given[0])):
            raise jinja2.TemplateRuntimeError("format too wide")
        if name in PRODUCTS and given:
            _check_size(PRODUCTS[name](given[0], *_texts(given[1:], kwargs)))
        made = function(*args, **kwargs)
        _check_size(_size_of(made))
        return made

    return bounded


def _texts(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
    return [*args, *kwargs.values()]


def _joined(parts: object, *rest: object) -> int:
    """Most characters that ``join`` makes of texts."""
    if not isinstance(parts, list | tuple | str):
        return 0
    return sum(map(_size_of, parts)) + len(parts) * sum(map(_size_of, rest))


def _replaced(text: object, *rest: object) -> int:
    """Most characters that ``replace`` makes."""
    texts = [one for one in rest if isinstance(one, str)]
    if len(texts) < 2 or not isinstance(text, str):
        return _size_of(text)
    count = text.count(texts[0]) if texts[0] else len(text) + 1
    return len(text) + count * len(texts[1])


def _indented(text: object, *rest: object) -> int:
    """Most characters that ``indent`` makes."""
    widths = [len(one) if isinstance(one, str) else one for one in rest if isinstance(one, str | int)]
    lines = text.count("\n") + 1 if isinstance(text, str) else 1
    return _size_of(text) + lines * max([4, *widths])


def _dumped(value: object, *rest: object) -> int:
    """A bound from below of what ``tojson`` makes with an indentation; the result is looked at besides."""
    return _size_of(value) * max([0, *(one for one in rest if isinstance(one, int))])


PRODUCTS: dict[str, Callable[..., int]] = {
    "join": _joined, "replace": _replaced, "indent": _indented, "tojson": _dumped,
}  # fmt: skip
"""Filters whose result may be longer than all their arguments together -> its length."""


def _check_widths(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    for one in (*args, *kwargs.values()):
        if isinstance(one, int) and abs(one) > MAX_WIDTH:
            raise jinja2.TemplateRuntimeError("number too large")


def _check_method(text: str, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raises TemplateRuntimeError for a method of a text that would make something huge."""
    _check_widths(args, kwargs)
    if name == "join" and args:
        parts = args[0]
        if isinstance(parts, list | tuple | str):
            _check_size(_joined(parts, text))
    elif name == "replace":
        _check_size(_replaced(text, *args))
    elif name in ("format", "format_map") and LONG_WIDTH.search(text):
        raise jinja2.TemplateRuntimeError("format too wide")
    elif name == "expandtabs":
        _check_size(len(text) + text.count("\t") * max([8, *(a for a in args if isinstance(a, int))]))
    elif name == "translate":
        raise jinja2.TemplateRuntimeError("texts have no translate")


def _check_numbers(operator: str, left: float, right: float) -> None:
    """Raises TemplateRuntimeError for a power or product of whole numbers that would be huge."""
    if operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
        raise jinja2.TemplateRuntimeError("number too large")
    whole = isinstance(left, int) and isinstance(right, int)
    if operator == "*" and whole and int(left).bit_length() + int(right).bit_length() > MAX_BITS:
        raise jinja2.TemplateRuntimeError("number too large")


def _limit_output(pieces: Iterator[str]) -> Iterator[str]:
    left = MAX_OUTPUT
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise jinja2.TemplateRuntimeError("output too long")
        yield piece


def render_template(data: bytearray, options: JsonObject) -> tuple[JsonObject, Sequence[memoryview]]:
    """The job of a worker.

    Args:
        data: JSON: the fields of ``chat_template.PreparedRendering``.
        options: none.

    Returns:
        ({}, [the marked text in UTF-8]), or ({"error", "param"}, []) where the template is wrong.
    """
    given = json.loads(data)
    marks: dict[str, str] = given["marks"]
    environment = make_environment(given["nonce"], lambda text: unmark_text(text, given["nonce"], marks))
    try:
        text = render(compile_source(environment, given["source"]), given["values"])
    except StartupError as error:
        return {"error": str(error), "param": "chat_template"}, []
    except BadRequest as error:
        return {"error": error.message, "param": error.param or "messages"}, []
    return {}, [memoryview(text.encode("utf-8", "surrogatepass"))]
