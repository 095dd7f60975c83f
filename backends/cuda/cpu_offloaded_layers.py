"""Layers with weights in pinned host memory, copied to the card while the layer before them is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from trencadis.backends.cuda.runtime_protocol import Runtime, Stream
from trencadis.core.errors import StartupError

T = TypeVar("T")

UNIT = 256
"""Tensors begin at multiples of this many bytes in a buffer."""

OTHERS = frozenset({"ops", "comm", "backend", "kv"})
"""Attributes of a layer's parts that are not searched for tensors."""


class HostLayers:
    """The last ``held`` layers of a decoder (``core.models.model_and_ops_api.LayersInHostMemory``).

    Each has a copy of its tensors in pinned memory. The tensors themselves are views of one of two buffers on the
    card, at fixed addresses: layers read them as usual, and graphs may hold them. Within a launch the buffers
    alternate, on a stream of their own: a copy waits until the layer that last used its buffer is done, and a layer for
    its copy. Copies begin with the launch, in parallel with the layers whose weights are on the card.

    Args:
        buffer: bytes of each of the two buffers.
    """

    def __init__(self, runtime: Runtime, count: int, buffer: int) -> None:
        self._runtime, self._count, self._size = runtime, count, buffer
        self._buffers: list[Tensor] = []
        self._images: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._layer_indices: dict[int, int] = {}
        self._layers: list[object] = []
        self._first = 0
        self._begun = runtime.event()
        self._arrived = [runtime.event(), runtime.event()]
        self._used = [runtime.event(), runtime.event()]

    def make(self) -> None:
        """Allocates the two buffers on the card."""
        self._buffers = [self._runtime.buffer(self._size) for _ in range(2)] if self._count else []

    @contextmanager
    def loading(self, layer: object, place: int, count: int) -> Iterator[None]:
        """Loads layer ``place`` of ``count`` inside the context; then moves its tensors if it is among the last
        ``held``.

        Raises:
            StartupError: the layer's tensors are larger than a buffer.
        """
        before = self._runtime.memory.free()
        yield
        if not self._count:
            return
        self._layer_indices[id(layer)] = place
        self._layers.append(layer)  # kept alive, so that its id stays unique
        self._first = count - self._count
        if place >= self._first:
            self._move(layer, place)
            self._runtime.release_bytes(before - self._runtime.memory.free())

    def _move(self, layer: object, index: int) -> None:
        """Copies the layer's tensors to pinned memory, and makes them views of a buffer."""
        buffer = self._buffers[(index - self._first) % 2]
        tensors, starts, end = tensors_of(layer), list[int](), 0
        for t in tensors:
            starts.append(end)
            end += -(-bytes_of(t) // UNIT) * UNIT
        if end > self._size:
            raise StartupError(
                f"layer {index} takes {end} bytes and config.json says at most {self._size}: its weights are not as "
                "config.json quantises them; leave out --cpu-offload-gb"
            )
        image = self._runtime.allocate_pinned((end,), torch.uint8)
        for t, at in zip(tensors, starts, strict=True):
            view_at(image, at, t).copy_(t)
            t.data = view_at(buffer, at, t)
        self._images.append(image)
        self._targets.append(buffer[:end])

    def run(self, layer: Callable[..., T], *args: Any) -> T:
        """Runs ``layer(*args)`` after its weights have arrived.

        Then starts the copy of the layer that reuses its buffer.
        """
        index, runtime = self._layer_indices.get(id(layer)), self._runtime
        if index is None:
            return layer(*args)
        if index == 0:
            runtime.record(self._begun, Stream.PROGRAMS)
            runtime.wait(Stream.WEIGHTS, self._begun)
            for number in range(2):
                self._copy(number)
        number = index - self._first
        if number < 0:
            return layer(*args)
        runtime.wait(Stream.PROGRAMS, self._arrived[number % 2])
        out = layer(*args)
        if number + 2 < self._count:
            runtime.record(self._used[number % 2], Stream.PROGRAMS)
            runtime.wait(Stream.WEIGHTS, self._used[number % 2])
            self._copy(number + 2)
        return out

    def _copy(self, number: int) -> None:
        self._runtime.upload_weights(self._targets[number], self._images[number])
        self._runtime.record(self._arrived[number % 2], Stream.WEIGHTS)


class HostLayerOps:
    """Implements ``Ops.layer`` for layers whose weights may be in host memory."""

    host_layers: HostLayers | None = None

    @property
    def fuses_layers(self) -> bool:
        """True if decoder layers of few tokens run in six launches, in which no library attends."""
        return False

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        """Runs ``run(*args)``, one layer of a stack."""
        return run(*args) if self.host_layers is None else self.host_layers.run(run, *args)


def bytes_of(t: Tensor) -> int:
    """Returns the bytes from the first element of ``t`` to its last."""
    far = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (far + 1) * t.element_size()


def view_at(area: Tensor, at: int, like: Tensor) -> Tensor:
    """Returns a tensor like ``like`` at byte ``at`` of uint8 ``area``, which begins its memory."""
    values = area[at : at + bytes_of(like)].view(like.dtype)
    return values.as_strided(like.shape, like.stride(), values.storage_offset())


def tensors_of(part: object) -> list[Tensor]:
    """Returns every tensor that a layer holds, each once, in the order of its attributes; not those of a KV cache."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def walk(value: object) -> None:
        if isinstance(value, Tensor):
            if value.numel():
                found[id(value)] = value
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif id(value) not in seen and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__")):
            if value is not part and callable(value) and not hasattr(type(value), "load"):
                return  # a class or a function
            seen.add(id(value))
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            walk([getattr(value, name) for name in names if name not in OTHERS and hasattr(value, name)])

    walk(part)
    return list(found.values())
