"""The adapters of one rank: those read into host memory, and the slots of the device that launches use.

Fused matrices of a stored adapter are cut into the model's single ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from trencadis.core.checkpoint.checkpoint_weight_source import fused_parts
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.model_registry import adapted_tower
from trencadis.core.device.backend import AdapterWeights, Backend, PackedAdapters
from trencadis.core.errors import StartupError
from trencadis.core.lora.adapter_files import WEIGHTS, Adapter, AdapterTensor, check_tower, read_adapter, read_matrix
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.linear_and_embedding import ColumnParallelLinear, Linear, RowParallelLinear, Share, pad_rows
from trencadis.core.models.mlp_and_norms import GatedMLP, PlainMLP
from trencadis.core.models.model_and_ops_api import Model
from trencadis.core.request import AdapterRef
from trencadis.core.step import AdapterUpload


class MatrixAdapter(NamedTuple):
    """The adapter of one matrix [out, in], which adds B A to it: A [rank, in], and B [out, rank] times the scale."""

    a: Tensor
    b: Tensor


def load_matrices(adapter: Adapter, text: TextConfig, dtype: torch.dtype = torch.float32) -> dict[str, MatrixAdapter]:
    """Reads an adapter: canonical name of each single matrix -> its A and B in ``dtype``; B includes the scale.

    Raises:
        StartupError: the file has changed or cannot be read, or a matrix has two adapters.
    """
    found: dict[str, MatrixAdapter] = {}
    path = adapter.folder / WEIGHTS
    try:
        data = np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    for name, module in adapter.modules.items():
        a, b = _to_torch(data, module.a), _to_torch(data, module.b) * module.scale
        outer, start = name.rpartition(".")[0], 0
        parts = fused_parts(text, f"{name}.weight") or {name.rpartition(".")[2]: module.b.rows}
        for part, rows in parts.items():
            made = MatrixAdapter(a.to(dtype), b[start : start + rows].to(dtype))
            if found.setdefault(f"{outer}.{part}", made) is not made:
                raise StartupError(f"{path} has two adapters for {outer}.{part}")
            start += rows
    return found


def _to_torch(data: np.ndarray, tensor: AdapterTensor) -> Tensor:
    """Returns a stored matrix in float32."""
    values = torch.from_numpy(read_matrix(data, tensor))
    return (values.view(torch.bfloat16) if tensor.kind == "BF16" else values).float()


class LayerPart(NamedTuple):
    """One matrix of a fused layer, as this rank holds it.

    Args:
        name: canonical name of the matrix.
        spans: its inputs on this rank (``by_inputs``), or its outputs; several of the latter if ranks divide each of
            the parts that the checkpoint stores as one matrix.
        width: its outputs on this rank, padding included.
    """

    name: str
    spans: tuple[Share, ...]
    width: int
    by_inputs: bool


class AdaptedLayer(NamedTuple):
    """A fused layer, its parts, its inputs on this rank (padding included), and the decoder layer that it is in.

    ``layer``: None in a vision tower.
    """

    linear: Linear
    parts: tuple[LayerPart, ...]
    inputs: int
    layer: DecoderLayer | None = None


class HeldLayer(NamedTuple):
    """A layer's part of an adapter in host memory.

    Args:
        parts: the adapters of its matrices on this rank, B transposed: [rank, outputs]; None: a matrix has none.
        packed: all of them as the device takes them, if it keeps slots in a layout of its own; ``parts`` is empty then.
    """

    parts: tuple[MatrixAdapter | None, ...]
    packed: object = None


@runtime_checkable
class PackingOps(Protocol):
    """Additional methods of ``Ops`` for devices that keep A and B in a layout of their own."""

    def allocate_adapters(
        self, slots: int, rank: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> PackedAdapters | None:
        """Allocates zeros for a fused matrix whose parts have ``widths`` outputs; None: it is kept unpacked."""
        ...

    def pack_adapter(self, w: PackedAdapters, parts: Sequence[MatrixAdapter | None]) -> object:
        """Returns A [rank, inputs] and B [rank, outputs] of each part, None: zeros, as ``put_adapters`` takes them.

        Runs in a thread beside launches, so that ``put_adapters``, between two of them, takes little time.
        """
        ...

    def put_adapters(self, w: PackedAdapters, contents: Mapping[int, object]) -> None:
        """Writes results of ``pack_adapter`` to slots; ``contents``: slot, from 0 -> result."""
        ...


class AdapterStore:
    """Reads adapters into host memory in a thread, and copies them to slots of the device between launches.

    Args:
        slots: number of slots; ``rank``: largest rank of an adapter, for which every slot has memory.
    """

    def __init__(self, model: Decoder, backend: Backend, slots: int, rank: int) -> None:
        self.config, self.backend, self.slots, self.rank = model.config, backend, slots, rank
        self.layers = [*find_layers(model)]
        for one in self.layers:
            one.linear.adapters = self._allocate(one)
        numbers = torch.arange(1, slots + 1, dtype=torch.int32)
        if backend.policy.joined_adapters:
            numbers = numbers.repeat_interleave(rank).repeat(max(len(one.parts) for one in self.layers))
        self._numbers = model.adapter_numbers = backend.zeros(numbers.shape, torch.int32)
        self._numbers.copy_(numbers)
        self._held: dict[str, list[HeldLayer]] = {}
        """Digest of an adapter -> its part of each of ``layers``."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def _allocate(self, one: AdaptedLayer) -> AdapterWeights | PackedAdapters:
        """Allocates the slots of one layer, filled with zeros."""
        widths, sizes = tuple(part.width for part in one.parts), (self.slots, self.rank, one.inputs)
        if isinstance(self.backend.ops, PackingOps):
            packed = self.backend.ops.allocate_adapters(*sizes, widths, self.backend.dtype)
            if packed is not None:
                return packed
        a = self.backend.zeros((self.slots, len(widths), self.rank, one.inputs), self.backend.dtype)
        b = (self.backend.zeros((self.slots, self.rank, width), self.backend.dtype) for width in widths)
        return AdapterWeights(a, tuple(b))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        total = self._numbers.nbytes
        for one in self.layers:
            w = one.linear.adapters
            assert w is not None
            total += sum(t.nbytes for t in (w.a, *w.b)) if isinstance(w, AdapterWeights) else w.nbytes
        return total

    def load(self, ref: AdapterRef, drop: Sequence[str] = ()) -> Future[str]:
        """Reads an adapter in a thread, unless it is held; first forgets those with the digests ``drop``.

        The result is an error message, or empty.
        """
        for digest in drop:
            self._held.pop(digest, None)
        return self._reader.submit(self._load, ref)

    def _load(self, ref: AdapterRef) -> str:
        if ref.digest in self._held:
            return ""
        try:
            adapter = read_adapter(Path(ref.path), self.config)
            if adapter.digest != ref.digest:
                return f"the files in {ref.path} have changed since the adapter was loaded; load it again"
            check_tower(adapter, self.config)
            if adapter.rank > self.rank:
                return f"the adapter in {ref.path} does not fit this server"
            self._held[ref.digest] = self._cut(load_matrices(adapter, self.config.text))
        except StartupError as error:
            return str(error)
        return ""

    def _cut(self, matrices: dict[str, MatrixAdapter]) -> list[HeldLayer]:
        """Returns this rank's share of an adapter, in the backend's dtype, for each layer."""
        found: list[HeldLayer] = []
        for one in self.layers:
            named = ((part, matrices.get(part.name)) for part in one.parts)
            parts = tuple(None if whole is None else self._cut_part(one, part, whole) for part, whole in named)
            w = one.linear.adapters
            if w is None or isinstance(w, AdapterWeights):
                found.append(HeldLayer(parts))
                continue
            assert isinstance(self.backend.ops, PackingOps)
            found.append(HeldLayer((), self.backend.ops.pack_adapter(w, parts)))
        return found

    def _cut_part(self, one: AdaptedLayer, part: LayerPart, whole: MatrixAdapter) -> MatrixAdapter:
        a, b = whole
        if part.by_inputs:
            a = a[:, part.spans[0].start : part.spans[0].stop]
        elif one.layer is not None:
            b = one.layer.attention.order_rows(part.name, b[part.spans[0].start : part.spans[0].stop])
        else:
            b = torch.cat([pad_rows(b[start:stop], width) for start, stop, width in part.spans])
        return MatrixAdapter(*(t.to(self.backend.dtype).contiguous() for t in (a, b.t())))

    def upload(self, uploads: Sequence[AdapterUpload]) -> None:
        """Copies adapters to slots; launches that have begun still see the slots' earlier contents."""
        for number, one in enumerate(self.layers):
            held = {slot - 1: self._held[digest][number] for slot, digest in uploads}
            weights = one.linear.adapters
            assert weights is not None
            if isinstance(weights, AdapterWeights):
                for slot, layer in held.items():
                    _fill(weights, slot, layer)
            else:
                assert isinstance(self.backend.ops, PackingOps)
                self.backend.ops.put_adapters(weights, {slot: layer.packed for slot, layer in held.items()})

    def close(self) -> None:
        """Ends the thread."""
        self._reader.shutdown(wait=False, cancel_futures=True)


def _fill(w: AdapterWeights, slot: int, held: HeldLayer) -> None:
    """Writes the adapter of one layer to a slot; zeros where it has no matrix, or a smaller rank."""
    for i, (found, b) in enumerate(zip(held.parts, w.b, strict=True)):
        overwrite(w.a[slot, i], None if found is None else found.a)
        overwrite(b[slot], None if found is None else found.b)


def overwrite(target: Tensor, source: Tensor | None) -> None:
    """Writes ``source`` to the beginning of ``target`` [rows, columns], and zeros to the rest."""
    rows, columns = (0, 0) if source is None else source.shape
    if source is not None:
        target[:rows, :columns] = source.to(target.device)
    target[rows:].zero_()
    if rows and columns < target.shape[1]:
        target[:rows, columns:].zero_()


def find_layers(model: Decoder) -> Iterator[AdaptedLayer]:
    """Yields the layers of a model that take adapters, as loaded on this rank."""
    yield from _find_decoder_layers(model)
    taken = {one.name for one in adapted_tower(model.config)}
    for name, linear, inputs, outputs in model.list_tower_layers():
        if isinstance(linear, ColumnParallelLinear):
            one = _columns(None, linear, name)
        elif isinstance(linear, RowParallelLinear):
            one = _rows(None, linear, name)
        else:
            one = AdaptedLayer(linear, (LayerPart(name, (Share(0, outputs, outputs),), outputs, False),), inputs)
        if taken.issuperset(part.name for part in one.parts):
            yield one


def _find_decoder_layers(model: Decoder) -> Iterator[AdaptedLayer]:
    for index, layer in zip(model.share.layers, model.layers, strict=True):
        if not isinstance(layer, DecoderLayer):
            continue
        name, mlp = f"layers.{index}", layer.mlp
        yield _columns(layer, layer.attention.qkv, f"{name}.self_attn")
        yield _rows(layer, layer.attention.out, f"{name}.self_attn.o_proj")
        if isinstance(mlp, GatedMLP | PlainMLP):
            yield _columns(layer, mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up, f"{name}.mlp")
            yield _rows(layer, mlp.down, f"{name}.mlp.down_proj")


def _columns(layer: DecoderLayer | None, linear: ColumnParallelLinear, name: str) -> AdaptedLayer:
    """Returns a layer that is divided by outputs; ``name``: of the module that its parts belong to, or, in a tower, of
    the matrix that the checkpoint stores for all of them.
    """
    shares = tuple(Share(at.start, at.stop, at.width) for at in linear.spans())
    if linear.fused and layer is None:
        whole = LayerPart(name, shares, sum(share.width for share in shares), False)
        return AdaptedLayer(linear, (whole,), linear.inputs)
    named = zip(linear.parts, shares, strict=True)
    parts = tuple(LayerPart(f"{name}.{part.name}", (share,), share.width, False) for part, share in named)
    return AdaptedLayer(linear, parts, linear.inputs, layer)


def _rows(layer: DecoderLayer | None, linear: RowParallelLinear, name: str) -> AdaptedLayer:
    """Returns a layer that is divided by inputs."""
    share = linear.span()
    part = LayerPart(name, (share,), linear.outputs, True)
    return AdaptedLayer(linear, (part,), share.width, layer)


def open_store(sizes: tuple[int, int, bool] | None, model: Model, backend: Backend) -> AdapterStore | None:
    """Allocates the slots of adapters beside a loaded model.

    ``sizes``: slots, rank, and what the backend's policy says of ``joined_adapters``; None: there are no slots.
    """
    if sizes is None or not isinstance(model, Decoder):
        return None
    return AdapterStore(model, backend, *sizes[:2])
