"""What Triton's interpreter gets wrong or cannot see, put right for the kernel tests.

* bfloat16 is held as raw bits, and sums, products, comparisons and dot products are computed on those bits; casts to it
  truncate. ``install`` computes them in float32 and rounds to nearest even, as the hardware does.
* A product of float32 is numpy's, which adds in an order that depends on the CPU and on a row's place among the rows;
  the tensor cores' does not. ``install`` multiplies in float64 and rounds once.
* A read or write outside a tensor goes unnoticed, or ends the process. ``install`` checks every address of every load,
  store and atomic against the tensors that the launch was given.
* Programs run one after the other, in order: races are invisible. ``order`` walks a grid backwards or at random.
* Every call of one kernel function by another patches the whole of ``triton.language``, 2 ms each time; ``install``
  patches it once a launch. Every value made builds a table of dtypes and a tuple of its shape anew; ``install`` keeps
  them.

``uncorrected`` takes all of it away, for the tests that show it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

ORDERS = ("forwards", "backwards", "random 1", "random 2")

Builder: Any = interpreter.InterpreterBuilder
Handle: Any = interpreter.TensorHandle
Executor: Any = interpreter.GridExecutor
ReduceScan: Any = interpreter.ReduceScanOpInterface


class OutOfBounds(AssertionError):
    """A kernel touched memory that no argument of the launch owns."""


# bfloat16


def widened(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 -> float32, exact."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrowed(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits of bfloat16, to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bfloat16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _wide(handle: Any) -> Any:
    return Handle(widened(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrow(handle: Any) -> Any:
    if handle.data.dtype == np.bool_:
        return Handle(handle.data, tl.bfloat16)
    return Handle(narrowed(handle.data), tl.bfloat16)


def _cast(original: Any) -> Any:
    def cast(self: Any, src: Any, dst: Any, *rest: Any) -> Any:
        if src.dtype.scalar == dst.scalar:
            return src
        src = _wide(src)
        if dst.scalar == tl.bfloat16:
            return Handle(narrowed(src.data.astype(np.float32)), tl.bfloat16)
        return src if src.dtype.scalar == dst.scalar else original(self, src, dst, *rest)

    return cast


def _arithmetic(original: Any) -> Any:
    """``original(self, *operands, op)`` on float32 where an operand is bfloat16; a choice needs only the bits."""

    def compute(self: Any, *args: Any) -> Any:
        *operands, op = args
        if op is np.where or not any(map(_is_bfloat16, operands)):
            return original(self, *args)
        return _narrow(original(self, *map(_wide, operands), op))

    return compute


def _function(original: Any) -> Any:
    """``original(self, *operands)`` on float32 where an operand is bfloat16."""

    def compute(self: Any, *operands: Any) -> Any:
        if not any(map(_is_bfloat16, operands)):
            return original(self, *operands)
        return _narrow(original(self, *map(_wide, operands)))

    return compute


def _dot(original: Any) -> Any:
    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = _wide(a), _wide(b)
        if not all(x.dtype.scalar.is_floating() and x.dtype.scalar.primitive_bitwidth >= 16 for x in (a, b)):
            return original(self, a, b, d, *rest)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
        return Handle(product + d.data, d.dtype.scalar)

    return dot


def _refuse_bfloat16(original: Any) -> Any:
    def check(self: Any, tensors: Any) -> Any:
        assert not any(t.handle.dtype.scalar == tl.bfloat16 for t in tensors), "reduce or scan float32, not bfloat16"
        return original(self, tensors)

    return check


# Bounds


class _Owned:
    """Address ranges of the current launch's tensors."""

    starts = np.zeros(0, np.uint64)
    stops = np.zeros(0, np.uint64)

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> None:
        ranges = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors)
        cls.starts = np.array([a for a, _ in ranges], np.uint64)
        cls.stops = np.maximum.accumulate(np.array([b for _, b in ranges], np.uint64))

    @classmethod
    def check(cls, pointers: Any, mask: Any, what: str) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        taken = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        at = pointers.data[taken].astype(np.uint64)
        if not at.size:
            return
        place = np.searchsorted(cls.starts, at, side="right") - 1
        inside = (place >= 0) & (at + np.uint64(size) <= cls.stops[np.maximum(place, 0)])
        if not inside.all():
            raise OutOfBounds(f"{what} at {int((~inside).sum())} of {at.size} addresses outside all arguments")


def _extent(t: torch.Tensor) -> int:
    if t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def _everything(pointers: Any) -> Any:
    return Handle(np.ones_like(pointers.data, dtype=bool), tl.int1)


def _bounded(original: Any, what: str, mask_at: int) -> Any:
    def access(self: Any, pointers: Any, *rest: Any) -> Any:
        _Owned.check(pointers, rest[mask_at], what)
        return original(self, pointers, *rest)

    return access


def _bounded_rmw(original: Any) -> Any:
    def access(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        assert not value.dtype.scalar.is_floating(), "an atomic on floats has no fixed order"
        _Owned.check(pointers, mask, "atomic")
        return original(self, op, pointers, value, mask, *rest)

    return access


def _bounded_cas(original: Any) -> Any:
    def access(self: Any, pointers: Any, *rest: Any) -> Any:
        _Owned.check(pointers, _everything(pointers), "atomic")
        return original(self, pointers, *rest)

    return access


# Launches


class _Grid:
    """The order in which a grid is walked."""

    order = "forwards"
    permutation: np.ndarray | None = None
    launches = 0

    @classmethod
    def begin(cls, count: int) -> None:
        cls.launches += 1
        kind, _, seed = cls.order.partition(" ")
        cls.permutation = None
        if kind == "backwards":
            cls.permutation = np.arange(count)[::-1]
        elif kind == "random":
            cls.permutation = np.random.default_rng(int(seed)).permutation(count)


def _grid_dim(original: Any) -> Any:
    def set_grid_dim(self: Any, nx: int, ny: int, nz: int) -> None:
        _Grid.begin(nx * ny * nz)
        original(self, nx, ny, nz)

    return set_grid_dim


def _grid_index(original: Any) -> Any:
    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        if _Grid.permutation is not None:
            _, ny, nz = self.grid_dim
            at = int(_Grid.permutation[(x * ny + y) * nz + z])
            x, y, z = at // (ny * nz), at // nz % ny, at % nz
        original(self, x, y, z)

    return set_grid_idx


def _launch(original: Any) -> Any:
    """The interpreter's own tensor calls are no part of the launch, so dispatch modes do not see them."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            _Owned.of([a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)])
            return original(self, *args, **kwargs)

    return call


@contextmanager
def order(kind: str) -> Iterator[None]:
    """Grids are walked ``forwards``, ``backwards`` or ``random SEED`` inside."""
    before, _Grid.order = _Grid.order, kind
    try:
        yield
    finally:
        _Grid.order = before


def launches() -> int:
    """Kernels launched so far."""
    return _Grid.launches


def in_all_orders(run: Callable[[], Any], every: bool = True) -> Any:
    """``run()`` (tensors, possibly nested in tuples and lists) gives the same bits in every order; what it gave last.

    Without ``every`` the grid is walked there and back: of any two programs each comes first once.
    """
    first: list[bytes] = []
    given: Any = None
    for kind in ORDERS if every else ORDERS[:2]:
        with order(kind):
            given = run()
            found = [_bits(t) for t in _flat(given)]
        assert found, "nothing to compare"
        assert not first or found == first, f"other bits with the grid walked {kind}"
        first = found
    return given


def _bits(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _flat(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for part in x or () for t in _flat(part)]


# Installing


def _patch_language(original: Any) -> Any:
    """Patches for a whole launch; what its functions ask for while it runs is done already."""

    def patch(fn: Any) -> Any:
        if _Language.patched:
            return SimpleNamespace(restore=lambda: None)
        _Language.patched = True
        scope = original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        # Triton 3.6 converts arrays of one element by int(), which numpy refuses from 2.4 on.
        tl.core.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())

        def restore() -> None:
            _Language.patched = False
            scope.restore()

        return SimpleNamespace(restore=restore)

    return patch


class _Language:
    patched = False


def _np_dtype(original: Any) -> Any:
    """numpy's dtype of a Triton type, looked up by its name once."""
    known: dict[str, Any] = {}

    def find(tt_dtype: Any) -> Any:
        if tt_dtype.name not in known:
            known[tt_dtype.name] = original(tt_dtype)
        return known[tt_dtype.name]

    return find


def _tensor(original: Any) -> Any:
    """As ``tl.tensor`` starts; tensors of one shape share the tuple of it, and its product, which nobody changes."""
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def start(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape not in shapes:
            original(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    return start


_PATCHES: list[tuple[Any, str, Any]] = [
    (Builder, "cast_impl", _cast),
    (Builder, "create_fp_to_fp", _cast),
    (Builder, "binary_op", _arithmetic),
    (Builder, "ternary_op", _arithmetic),
    (Builder, "unary_op", _arithmetic),
    (Builder, "create_fma", _function),
    (Builder, "create_erf", _function),
    (Builder, "create_rsqrt", _function),
    (Builder, "create_dot", _dot),
    (ReduceScan, "check_tensor", _refuse_bfloat16),
    (Builder, "create_masked_load", lambda original: _bounded(original, "load", 0)),
    (Builder, "create_masked_store", lambda original: _bounded(original, "store", 1)),
    (Builder, "create_atomic_rmw", _bounded_rmw),
    (Builder, "create_atomic_cas", _bounded_cas),
    (Builder, "set_grid_dim", _grid_dim),
    (Builder, "set_grid_idx", _grid_index),
    (Executor, "__call__", _launch),
    (interpreter, "_patch_lang", _patch_language),
    (interpreter, "_get_np_dtype", _np_dtype),
    (tl.tensor, "__init__", _tensor),
]
_originals: dict[tuple[Any, str], Any] = {}


def install() -> None:
    """Puts the corrections in place; once is enough."""
    if not _originals:
        for owner, name, patch in _PATCHES:
            _originals[owner, name] = getattr(owner, name)
            setattr(owner, name, patch(_originals[owner, name]))


@contextmanager
def uncorrected() -> Iterator[None]:
    """The interpreter as Triton ships it."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    try:
        yield
    finally:
        install()
