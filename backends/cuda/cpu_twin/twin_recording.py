"""A graph without a card: the ATen calls of a launch are recorded, and a replay runs those, not the Python code.

Whatever would go stale in a CUDA graph goes stale here: a value that Python read, a tensor that was replaced, a length
that became a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

HOST_READS = (
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "is_nonzero", "bincount", "histc",
)  # fmt: skip
"""Calls whose result depends on values, which a capture cannot hold."""

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
"""Calls that a card runs by its library of products."""

INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
"""Calls that count the true elements of a mask on the host, if their index is a mask."""


def capture_violation(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object] | None, out: Any) -> str:
    """Returns why a capture does not permit a call; an empty string if it does."""
    name = func.overloadpacket.__name__
    masks = name in INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    filled = masks and len(args) > 2 and args[2].numel() == 1  # the same as masked_fill, which is allowed
    grows = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and len(args) < 2
    if name in HOST_READS or (masks and not filled) or grows:
        return f"aten.{name} reads a value on the host, which a capture does not permit"
    if name == "lift_fresh" and out.dim():  # a number is filled in, not copied
        return "a copy from pageable memory waits for the card, which a capture does not permit"
    return ""


def collect_outputs(out: object) -> list[Any]:
    """Returns the leaves of a call's result.

    A collective returns before it is done, so the recording waits for it, as a stream does.
    """
    leaves = tree_flatten(out)[0]
    for x in leaves:
        if isinstance(x, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(x).wait()
    return leaves


class TwinSlot(int):
    """The number of a tensor that lives only within the launch."""


class TwinRecording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a launch: ``with TwinRecording() as recording: out = body(inputs)``, then ``recording.close(out)``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, list[Any], Any, list[TwinSlot | None]]] = []
        self.bytes = 0
        """Peak bytes of the launch in addition to the memory from before it; known once it is closed."""
        self.kept = 0
        """Bytes of its results that did not exist before it."""
        self.temporary: set[int] = set()
        """Ids of its results that lie in the workspace of its pool."""
        self._slots: dict[int, TwinSlot] = {}
        self._alive: list[Tensor] = []
        self._made_at: list[int] = []
        self._used_at: dict[int, int] = {}
        self._standing: set[int] = set()
        """Storages from before the launch: weights, the KV cache, inputs. A view of one takes no memory."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        for x in flat:
            if isinstance(x, Tensor):
                self._used_at[x.untyped_storage().data_ptr()] = len(self.steps)
        given = [self._slots.get(id(x), x) if isinstance(x, Tensor) else x for x in flat]
        self._standing.update(x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor))
        out = func(*args, **(kwargs or {}))
        if why := capture_violation(func, args, kwargs, out):
            raise RuntimeError(why)
        known = {id(x) for x in flat if isinstance(x, Tensor)}
        made: list[TwinSlot | None] = []
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor) and id(t) not in known:
                made.append(self._add_slot(t))
            else:
                made.append(None)
        self.steps.append((func, given, spec, made))
        return out

    def _add_slot(self, t: Tensor) -> TwinSlot:
        slot = self._slots[id(t)] = TwinSlot(len(self._alive))
        self._alive.append(t)
        self._made_at.append(len(self.steps))
        return slot

    @property
    def multiplies(self) -> bool:
        """True if the launch has a product, for which a card's library takes a workspace."""
        return any(func.overloadpacket.__name__ in PRODUCTS for func, *_ in self.steps)

    def reads(self, tensors: Iterable[Tensor]) -> bool:
        """Returns True if the launch took one of these tensors from before it, or a view of it."""
        return any(t.untyped_storage().data_ptr() in self._standing for t in tensors)

    def close(self, out: object) -> None:
        """Ends the recording. Every replay overwrites the tensors of ``out``; other results of the launch are freed."""
        leaves = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        self._out = [(self._slots[id(t)], t) for t in leaves]
        made = [t for t in leaves if t.untyped_storage().data_ptr() not in self._standing]
        self.kept, self.temporary = sum(t.nbytes for t in made), {id(t) for t in made}
        self.bytes = self._peak()
        self._slots.clear()
        self._alive.clear()

    def _peak(self) -> int:
        """Returns the peak bytes: a storage lives from the call that makes it to the last that reads it, as in an
        allocator.
        """
        change = [0] * (len(self.steps) + 2)
        seen = set(self._standing)
        for t, made in zip(self._alive, self._made_at, strict=True):
            storage, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
            if storage not in seen:
                seen.add(storage)
                change[made] += size
                change[self._used_at.get(storage, made) + 1] -= size
        return max(accumulate(change))

    def replay(self) -> None:
        """Runs the calls again on the current contents of the tensors."""
        made: dict[TwinSlot, Tensor] = {}
        with torch.no_grad():
            for func, given, spec, slots in self.steps:
                args, kwargs = tree_unflatten([made[x] if isinstance(x, TwinSlot) else x for x in given], spec)
                for slot, t in zip(slots, collect_outputs(func(*args, **kwargs)), strict=True):
                    if slot is not None:
                        made[slot] = t
            for slot, target in self._out:
                target.copy_(made[slot])


class LaunchReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen`` with every tensor that a call of a launch takes."""

    def __init__(self, on_read: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_read = on_read

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(x, Tensor):
                self._on_read(x)
        return func(*args, **(kwargs or {}))
