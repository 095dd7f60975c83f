"""Compile mode: the parts of a body that are compiled by themselves, so that layers and buckets share them.

A part that Dynamo cannot trace is compiled again with graph breaks, and one that the card's graph compiler refuses runs
operation by operation. Several layers of a DECODE launch may be one region, since dispatching each alone takes longer
than its work on the card.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from trencadis.backends.hpu.habana_bridge import Bridge, is_compiler_failure, join_lines
from trencadis.backends.hpu.hpu_settings import FULLGRAPH, HpuSettings
from trencadis.backends.hpu.shape_policy import split_neighbours
from trencadis.core.errors import StartupError

log = logging.getLogger("trencadis.engine")

Part = Callable[..., Any]


class RegionCompiler:
    """Makes functions of fixed shapes with the bridge's compiler.

    A part is compiled as one graph first. Where Dynamo fails and the settings allow it, a warning names the part and
    the line, and the part is compiled again with graph breaks (``fullgraph=False``), which costs time in each launch.
    Where that fails too, or the card's graph compiler does, the part runs uncompiled.

    Attributes:
        broken: names of the parts that are compiled with graph breaks, or not at all.
        dry: True in compile-only mode, where a failure of the graph compiler is raised: it may succeed where a launch
            really runs.
    """

    def __init__(self, bridge: Bridge, settings: HpuSettings) -> None:
        self._bridge, self._settings = bridge, settings
        self.broken: set[str] = set()
        self.dry = False

    def compile(self, make: Callable[[], Part], name: str) -> Part:
        """Returns the compiled function of the part ``name``.

        Args:
            make: returns the function to compile, with a code object of its own at each call.
        """
        fullgraph = self._settings.fullgraph
        compiled = self._bridge.compile(make(), fullgraph=fullgraph)
        known: list[Part] = []

        def run(*args: Any) -> Any:
            if known:
                return known[0](*args)
            try:
                out = self._first(compiled, args)
            except RuntimeError as error:
                found, out = self._replace(make, name, error, args)
                known.append(found)
            else:
                known.append(compiled)
            return out

        return run

    def _first(self, run: Part, args: tuple[object, ...]) -> object:
        """Runs a compiled function for the first time, and waits, since its recipes are compiled by another thread."""
        out = run(*args)
        self._bridge.synchronize()
        return out

    def _replace(
        self, make: Callable[[], Part], name: str, error: RuntimeError, args: tuple[object, ...]
    ) -> tuple[Part, object]:
        """Returns a function that takes the place of one that failed, and its result.

        Raises:
            StartupError: the settings ask for one graph without breaks.
            RuntimeError: an error of neither compiler; a lack of memory; in compile-only mode, any of the card's
                compiler.
        """
        refused = is_compiler_failure(error)
        if self._bridge.out_of_memory(error) or (self.dry if refused else not is_dynamos(error)):
            raise error
        fullgraph = self._settings.fullgraph
        if fullgraph and not self._settings.graph_breaks:
            raise StartupError(describe_failure(name, error)) from None
        first = name not in self.broken
        self.broken.add(name)
        if fullgraph and not refused:
            log.warning("%s; it is compiled with graph breaks, which cost time in each launch.",
                        describe_failure(name, error))  # fmt: skip
            broken = self._bridge.compile(make(), fullgraph=False)
            try:
                return broken, self._first(broken, args)
            except RuntimeError as again:
                if not (is_dynamos(again) or (is_compiler_failure(again) and not self.dry)):
                    raise
                error, first = again, True
        if first:
            log.warning("%s; it runs operation by operation, which is slow.", describe_failure(name, error))
        plain = make()
        return plain, plain(*args)


def is_dynamos(error: BaseException) -> bool:
    """Returns True for an error of torch's compiler: a part that it cannot trace, or a failure of its backend."""
    from torch._dynamo.exc import TorchDynamoException  # loaded only where something was compiled

    return isinstance(error, TorchDynamoException)


def describe_failure(name: str, error: BaseException) -> str:
    """Returns one line: the part that cannot be compiled, the line of code, and Dynamo's reason."""
    if is_compiler_failure(error):
        return f"hpu: the card's graph compiler refuses {name} ({join_lines(error)}); {FULLGRAPH}"
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
    context = [text.partition(": ")[2] for text in lines if text.startswith("Developer debug context")]
    reason = "; ".join([lines[0], *context])[:240]
    return f"hpu: {name} cannot be compiled as one graph at {line_of(error)} ({reason}); {FULLGRAPH}"


OWN = str(Path(__file__).resolve().parents[3])
"""Folder of the product, whose lines are named before those of the plug-in."""


def line_of(error: BaseException) -> str:
    """Returns ``folder/file:line`` of the innermost traced frame of the product, or of any frame; "" if unknown."""
    frames = list(getattr(error, "real_stack", None) or [])
    ours = [frame for frame in frames if os.path.realpath(frame.filename).startswith(OWN)]
    for frame in reversed(ours or frames):
        path = Path(frame.filename)
        return f"{path.parent.name}/{path.name}:{frame.lineno}"
    return "an unknown line"


class Regions:
    """Keeps one compiled function for each kind of part and shapes of its arguments.

    Each has a code object of its own: the compiler tries the variants of a code object one after the other, and their
    guards would cost more than the launch.

    Args:
        compiler: makes functions of fixed shapes.
    """

    def __init__(self, compiler: RegionCompiler) -> None:
        self.compiler = compiler
        self.known: dict[Hashable, Part] = {}
        self._kinds: dict[int, tuple[Any, Hashable]] = {}

    def __call__(self, run: Part, *args: Any) -> Any:
        """Runs ``run(*args)`` by the function compiled for its kind and shapes; compiles it at the first call."""
        key = (self._kind(run), shapes(args))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.compiler.compile(partial(own_code, part), name_of(run))
        return found(run, *args)

    def _kind(self, run: Part) -> Hashable:
        """Returns the cache key of ``run``; the object is kept alive with it, so that its id cannot be reused."""
        owner = getattr(run, "__self__", run)
        known = self._kinds.get(id(owner))
        if known is None:
            known = self._kinds[id(owner)] = (owner, kind_of(owner))
        return getattr(run, "__name__", ""), known[1]


def name_of(run: Part) -> str:
    """Returns the name of a part for users, such as ``DecoderLayer.forward``."""
    owner = getattr(run, "__self__", None)
    name = getattr(run, "__name__", type(run).__name__)
    return name if owner is None else f"{type(owner).__name__}.{name}"


def part(run: Part, *args: Any) -> Any:
    """The function that is compiled: a part's own tensors are read from ``run``, since they must not be constants."""
    return run(*args)


def own_code(function: Part) -> Part:
    """Returns a copy of ``function`` with a code object of its own: torch keeps compiled variants per code object."""
    plain: Any = function
    made: Part = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__)
    return made


def shapes(tree: Any) -> Hashable:
    """Returns shapes and dtypes of the tensors in nested tuples, and everything else unchanged."""
    if isinstance(tree, tuple):
        return (type(tree), *(shapes(item) for item in tree))
    return (tree.shape, tree.dtype) if isinstance(tree, Tensor) else tree


def kind_of(value: Any) -> Hashable:
    """Returns the class of a part and the key of each of its attributes: shapes of tensors, numbers, functions, parts.

    Persistent tensors (``kv``, ``state``) are left out: they are replaced after profiling.
    """
    found: list[Hashable] = [type(value).__qualname__]
    for name in [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]:
        if name not in ("ops", "comm", "kv", "state"):
            found.append((name, _attribute_key(getattr(value, name))))
    return tuple(found)


def _attribute_key(item: object) -> Hashable:
    """Returns the key of an attribute; parts in tuples and lists by their kinds, as parts of equal layers differ."""
    if isinstance(item, tuple | list):
        return (type(item), *map(_attribute_key, item))
    if isinstance(item, Tensor | int | float | str | bool) or item is None:
        return shapes(item)
    if isinstance(item, MethodType):
        return item.__qualname__
    if hasattr(item, "__dict__") or hasattr(type(item), "__slots__"):
        return kind_of(item)
    return None


SIZES = (1, 2, 4)
"""Layers of a region that may be asked for."""


class LayerGroup:
    """Up to four layers that run one after the other; equal groups share a region.

    Each layer is an attribute of its own, because the key of a region is made of attributes.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.local: bool = layers[0].local
        self.causal: bool = layers[0].causal
        self.recurrent = False  # models with such layers are not grouped
        self.first, self.second, self.third, self.fourth = (*layers, None, None, None)[:4]

    def __call__(self, x: Any, residual: Any, rotary: Any, attn: Any) -> Any:
        for layer in (self.first, self.second, self.third, self.fourth):
            if layer is not None:
                x, residual = layer(x, residual, rotary, attn)
        return x, residual


def group_layers(layers: Sequence[Any], size: int) -> list[Any]:
    """Returns ``layers`` in groups of ``size`` neighbours that take the same inputs; those left over are alone."""
    parts = split_neighbours([(layer.local, layer.causal) for layer in layers], size)
    return [layers[some[0]] if len(some) == 1 else LayerGroup([layers[i] for i in some]) for some in parts]
