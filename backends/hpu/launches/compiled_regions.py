"""Compile mode: parts of a body that are compiled by themselves, so that layers and buckets share them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor

from trencadis.backends.hpu.launches.region_compiler import Part, RegionCompiler


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
        item = getattr(value, name)
        if name in ("ops", "comm", "kv", "state"):
            continue
        if isinstance(item, Tensor | int | float | str | bool | tuple) or item is None:
            found.append((name, shapes(item)))
        elif hasattr(item, "__func__"):
            found.append((name, item.__func__.__qualname__))
        elif hasattr(item, "__dict__") or hasattr(type(item), "__slots__"):
            found.append((name, kind_of(item)))
    return tuple(found)
