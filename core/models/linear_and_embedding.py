"""Linear layers, sharded over ranks by output columns or by input rows; token embedding and output head, tied or not.

Weights are packed while they are loaded. A backend wrapper serves layers that every rank holds whole. Tokens are
sampled from the logits of the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.weight_source_interface import SharingOps, StackedPart, StoredRows, WeightSource
from trencadis.core.device.backend import (
    AdapterRows,
    AdapterWeights,
    Backend,
    Comm,
    HeadTensors,
    HeadTensorsOut,
    Ops,
    PackedAdapters,
    SamplerState,
    Weight,
)
from trencadis.core.device.communicators_and_rank_agreement import SingleRank
from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import QTensor, fits, join_weights

if TYPE_CHECKING:
    from trencadis.core.models.model_and_ops_api import BestOps, DrawingOps, MaskingOps, PenalisingOps


Matrix = Tensor | QTensor
"""A weight [out, in] as it is stored."""


class Linear:
    """This rank's share of a packed weight [out, in]; several weights if its parts are quantised in different ways."""

    weights: list[Weight]
    adapters: AdapterWeights | PackedAdapters | None = None
    """A and B of the adapters' slots, if the layer takes adapters."""

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self.ops, self.comm = ops, comm
        self.bytes = 0

    def pack(self, weight: Matrix, bias: Tensor | None) -> None:
        """Packs the raw weight [out, in] and bias [out] of this rank, and keeps only the packed form."""
        self.pack_separately([weight], bias)

    def pack_separately(self, parts: list[Matrix], bias: Tensor | None) -> None:
        """Packs weights of the same input whose outputs are concatenated; ``bias`` covers all of them."""
        self.bytes, self.weights, start = bias.nbytes if bias is not None else 0, [], 0
        for part in parts:
            rows = part.shape[0]
            own = bias if bias is None or len(parts) == 1 else bias[start : start + rows]
            start += rows
            if isinstance(part, Tensor):
                self.bytes += part.nbytes
                self.weights.append(self.ops.pack_weight(part, own))
                continue
            packed = self.ops.pack_quantised(part, own)
            # A backend that keeps the integers reports their bytes; others keep a weight of the engine's dtype.
            self.bytes += getattr(packed, "nbytes", rows * part.shape[1] * part.dtype.itemsize)
            self.weights.append(packed)

    def pack_stored(
        self, source: WeightSource, parts: list[StackedPart], inputs: tuple[int, int, int, int], bias: Tensor | None
    ) -> bool:
        """Packs rows directly from their stored form; returns False if source or ops do not support that.

        Args:
            inputs: (columns of the stored matrix, start, stop and padded width of this rank's columns).
        """
        give, pack = getattr(source, "stored", None), getattr(self.ops, "pack_stored", None)
        if give is None or pack is None:
            return False
        whole, start, stop, width = inputs
        rows: StoredRows | None = give(parts, whole, start, stop)
        if rows is None:
            return False
        packed: Weight | None = pack(rows._replace(inputs=width), bias)
        if packed is None:
            return False
        self.bytes = rows._replace(inputs=width).nbytes + (bias.nbytes if bias is not None else 0)
        self.weights = [packed]
        return True

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Computes [n, in of this rank] -> [n, out of this rank] in the backend's dtype.

        ``rows``: the adapters of the tokens; None: the launch has none.
        """
        if len(self.weights) == 1:
            y = self.ops.linear(x, self.weights[0])
        else:
            y = torch.cat([self.ops.linear(x, weight) for weight in self.weights], 1)
        return y if rows is None or self.adapters is None else self.ops.add_adapters(y, x, self.adapters, rows)


class TowerLayer(NamedTuple):
    """A layer of a vision tower that takes adapters.

    Args:
        name: canonical name of its matrix, or of the module that its parts belong to if it has several.
        inputs, outputs: features of a plain ``Linear``, which every rank holds whole; others know their own.
    """

    name: str
    linear: Linear
    inputs: int = 0
    outputs: int = 0


class ImageAdapters(NamedTuple):
    """The adapters of a VISION launch: of its slots, and of its cells; None: no image has one."""

    slots: AdapterRows | None = None
    cells: AdapterRows | None = None

    @property
    def of_layers(self) -> tuple[AdapterRows, ...]:
        """The last argument of a layer; empty if it has none."""
        return () if self.slots is None else (self.slots,)


NO_ADAPTERS = ImageAdapters()


class Share(NamedTuple):
    """A rank's share [start, stop) of a dimension, padded to ``width``."""

    start: int
    stop: int
    width: int


class ColumnPart(NamedTuple):
    """One matrix of ``ColumnParallelLinear``: name, output features, and features of a unit that is never split."""

    name: str
    size: int
    unit: int


def span(size: int, rank: int, world: int, unit: int = 1) -> Share:
    """Returns a rank's share: all have equal widths, multiples of ``unit``; the last ones are padded if necessary."""
    width = align_up(-(-size // world), unit)
    return Share(min(rank * width, size), min((rank + 1) * width, size), width)


class PartSpan(NamedTuple):
    """A part of a matrix: output features of the stored matrix, and start, stop and padded width of this rank's."""

    size: int
    start: int
    stop: int
    width: int


class ColumnParallelLinear(Linear):
    """Several fused matrices with the same input, each split by output features.

    Args:
        parts: the matrices. A unit (a head) is never split; if a part has fewer units than there are ranks (KV heads),
            they are replicated.
        bias: True if the configuration has biases; otherwise those of the checkpoint are ignored.
        fused: the checkpoint stores the parts as one matrix.
        unit: this rank's outputs of each part are padded with zeros to a multiple of it.
    """

    def __init__(
        self,
        ops: Ops,
        comm: Comm,
        inputs: int,
        parts: tuple[ColumnPart, ...],
        bias: bool = False,
        fused: bool = False,
        unit: int = 1,
    ) -> None:
        super().__init__(ops, comm)
        self.inputs, self.parts, self.bias, self.fused, self.unit = inputs, parts, bias, fused, unit

    def load(self, source: WeightSource, base: str) -> None:
        names = [base if self.fused else f"{base}.{name}" for name, _, _ in self.parts]
        spans = self.spans()
        biases = None
        if self.bias:
            biases = _join([self._take_bias(source, name, *where) for name, where in zip(names, spans, strict=True)])
        held = [self._take_quantised(source, name, *where) for name, where in zip(names, spans, strict=True)]
        if all(found is None for found in held):
            parts = [StackedPart(f"{name}.weight", *where) for name, where in zip(names, spans, strict=True)]
            if not self.pack_stored(source, parts, (self.inputs, 0, self.inputs, self.inputs), biases):
                self.pack(source.take_stacked(parts, self.inputs), biases)
            return
        weights = [
            self._take_plain(source, name, *where) if found is None else found
            for found, name, where in zip(held, names, spans, strict=True)
        ]
        self.pack_separately(merge_or_separate(weights), biases)

    def spans(self) -> list[PartSpan]:
        """Returns the span of each part."""
        total, offset, found = sum(size for _, size, _ in self.parts), 0, list[PartSpan]()
        for _, size, unit in self.parts:
            start, stop, width = unit_span(size, unit, self.comm.rank, self.comm.world)
            width = align_up(width, self.unit)
            found.append(PartSpan(total if self.fused else size, offset + start, offset + stop, width))
            offset += size if self.fused else 0
        return found

    def _take_quantised(
        self, source: WeightSource, name: str, size: int, start: int, stop: int, width: int
    ) -> QTensor | None:
        found = source.take_quantised(name, (size, self.inputs), 0, start, stop)
        return None if found is None else found.padded(width, self.inputs)

    def _take_plain(self, source: WeightSource, name: str, size: int, start: int, stop: int, width: int) -> Tensor:
        return pad_rows(source.shard(f"{name}.weight", (size, self.inputs), 0, start, stop), width)

    def _take_bias(self, source: WeightSource, name: str, size: int, start: int, stop: int, width: int) -> Tensor:
        return pad_rows(source.shard(f"{name}.bias", (size,), 0, start, stop), width)


class RowParallelLinear(Linear):
    """One matrix split by input features; the ranks' partial results are summed, and only rank 0 adds the bias.

    ``unit``: number of inputs that are never split; ``filled``: this rank's inputs are padded to a multiple of it.
    """

    def __init__(
        self, ops: Ops, comm: Comm, inputs: int, outputs: int, unit: int = 1, bias: bool = False, filled: int = 1
    ) -> None:
        super().__init__(ops, comm)
        self.inputs, self.outputs, self.unit, self.bias, self.filled = inputs, outputs, unit, bias, filled

    def span(self) -> Share:
        """Returns this rank's inputs."""
        start, stop, width = unit_span(self.inputs, self.unit, self.comm.rank, self.comm.world)
        return Share(start, stop, align_up(width, self.filled))

    def load(self, source: WeightSource, name: str) -> None:
        start, stop, width = self.span()
        own_bias = self.bias and self.comm.rank == 0
        bias = source.take(f"{name}.bias", (self.outputs,)) if own_bias else None
        found = source.take_quantised(name, (self.outputs, self.inputs), 1, start, stop)
        if found is not None:
            self.pack(found.padded(self.outputs, width), bias)
            return
        part = StackedPart(f"{name}.weight", self.outputs, 0, self.outputs, self.outputs)
        if self.pack_stored(source, [part], (self.inputs, start, stop, width), bias):
            return
        weight = source.shard(part.name, (self.outputs, self.inputs), 1, start, stop)
        if stop - start < width:
            weight = functional.pad(weight, (0, width - (stop - start)))
        self.pack(weight, bias)

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Computes [n, in of this rank] -> [n, out], summed over ranks, in the backend's dtype."""
        return self.reduce(self.product(x, rows))

    product = Linear.__call__
    """Returns this rank's part of the sum."""

    def reduce(self, y: Tensor) -> Tensor:
        """Returns the sum of the ranks' parts."""
        if self.comm.world == 1:
            return y
        self.ops.cut("collective")
        return self.comm.all_reduce(y)


def unit_span(size: int, unit: int, rank: int, world: int) -> Share:
    """Returns ``span`` in whole units; if there are fewer units than ranks, consecutive ranks share one."""
    units = size // unit
    if units < world and unit > 1:
        first = rank * units // world
        return Share(first * unit, (first + 1) * unit, unit)
    share = span(units, rank, world)
    return Share(*(value * unit for value in share))


def check_heads(heads: int, world: int, what: str) -> None:
    """Raises StartupError if ``world`` ranks cannot share ``heads``; the message lists the numbers that can."""
    if heads % world:
        sizes = ", ".join(str(w) for w in range(1, heads + 1) if heads % w == 0)
        raise StartupError(f"--tensor-parallel-size {world} does not divide the {heads} {what}; use one of {sizes}")


def scaled(x: Tensor, scale: float) -> Tensor:
    """Returns ``x`` times ``scale``; ``x`` itself, without an operation, if ``scale`` is 1."""
    return x if scale == 1 else x * scale


def pad_rows(t: Tensor, width: int) -> Tensor:
    """Pads [rows, ...] with zeros to [width, ...] of the same dtype."""
    missing = width - t.shape[0]
    return t if missing == 0 else torch.cat([t, t.new_zeros((missing, *t.shape[1:]))])


def merge_or_separate(parts: list[Matrix]) -> list[Matrix]:
    """Joins the parts to one matrix if possible; otherwise returns them unchanged, to be multiplied separately."""
    if all(isinstance(part, Tensor) for part in parts):
        return [_join([part for part in parts if isinstance(part, Tensor)])]
    whole = [part for part in parts if isinstance(part, QTensor)]
    if len(whole) == len(parts) and all(fits(whole[0], part) for part in whole[1:]):
        return [join_weights(whole)]
    return parts


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ReplicatedBackend:
    """A backend without collectives, for layers that are not sharded; all else is the wrapped backend's."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.comm = backend, SingleRank()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def replicate_layers(backend: Backend) -> Backend:
    """Returns ``backend`` for layers that are not sharded over its ranks."""
    return cast(Backend, ReplicatedBackend(backend))


LAST = 0x7FFFFFFF
"""Constant from which an output's index is subtracted in the codes of ``BestOps.best_outputs``."""


class Embedding:
    """The table [vocabulary, hidden], whole on every rank. If ops can read rows of a tied head's weight, it is that."""

    def __init__(self, ops: Ops, vocab: int, hidden: int) -> None:
        self.ops, self.vocab, self.hidden = ops, vocab, hidden
        self.table: Tensor

    def load(self, source: WeightSource, name: str, head: LMHead | None = None) -> bool:
        """Loads the table. If a tied ``head`` is given and its packed weight can be read by rows, that is loaded
        instead.

        Returns:
            True if ``head`` has been loaded.
        """
        if head is not None and not (
            isinstance(self.ops, SharingOps) and head.vocab == self.vocab and head.pack_share(source, name)
        ):
            head = None
        if head is None or not self.share(head):
            self.table = source.take(f"{name}.weight", (self.vocab, self.hidden))
        return head is not None

    def share(self, head: LMHead) -> bool:
        """Uses the weight of a tied ``head`` as the table if ops support it; returns True if so."""
        table = self.ops.table_of(head.weights[0]) if isinstance(self.ops, SharingOps) else None
        if table is not None:
            self.table = table
        return table is not None

    def __call__(self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor) -> Tensor:
        """Returns the inputs of the decoder, [n, hidden] of the backend's dtype.

        Each row is the embedding of the given id or of the id last sampled in a slot, or the arena row of an image.

        Args:
            tokens, from_slot, image_row: int32 [n].
            last: int32 [slots + 1].
            arena: [arena rows, hidden].
        """
        return self.ops.embed(tokens, from_slot, last, image_row, arena, self.table)

    def nbytes(self) -> int:
        return self.vocab * self.hidden * self.table.element_size()


class LMHead(Linear):
    """The output head. Each rank holds a share of the vocabulary; the logits are gathered on all ranks.

    ``scale``: factor of the logits; 1: no multiplication. ``unit``: with several ranks, shares are multiples of it.
    ``cap``: as ``TextConfig.logit_cap``.
    """

    def __init__(
        self, ops: Ops, comm: Comm, vocab: int, hidden: int, scale: float = 1.0, unit: int = 1, cap: float = 0.0
    ) -> None:
        super().__init__(ops, comm)
        self.vocab, self.hidden, self.scale, self.cap = vocab, hidden, scale, cap
        self.unit = unit if comm.world > 1 else 1
        self.start, self.stop, _ = span(vocab, comm.rank, comm.world, self.unit)
        self._coded: bool | None = None

    def load(self, source: WeightSource, name: str) -> None:
        start, stop, width = span(self.vocab, self.comm.rank, self.comm.world, self.unit)
        found = source.take_quantised(name, (self.vocab, self.hidden), 0, start, stop, own="lm_head")
        if found is not None:
            self.pack(found.padded(width, self.hidden), None)
        elif not self.pack_share(source, name):
            weight = source.shard(f"{name}.weight", (self.vocab, self.hidden), 0, start, stop)
            self.pack(pad_rows(weight, width), None)

    def pack_share(self, source: WeightSource, name: str) -> bool:
        """Packs this rank's share directly from stored rows; returns False if source or ops do not support that."""
        part = StackedPart(f"{name}.weight", self.vocab, *span(self.vocab, self.comm.rank, self.comm.world, self.unit))
        return self.pack_stored(source, [part], (self.hidden, 0, self.hidden, self.hidden), None)

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Returns the logits [r, vocabulary] of hidden states [r, hidden], in the backend's dtype."""
        y = super().__call__(x)
        if self.scale != 1:
            y = y * self.scale
        if self.cap:
            y = (y / self.cap).tanh() * self.cap
        return y if self.comm.world == 1 else self._gather_logits(y)

    def _gather_logits(self, y: Tensor) -> Tensor:
        """Gathers the logits of all ranks."""
        self.ops.cut("collective")
        return self.comm.all_gather(y)[:, : self.vocab]

    def best(self, x: Tensor) -> Tensor | None:
        """Returns the argmax of each row, int64 [r] (first on ties), without storing logits; None: not possible here.

        For devices whose policy says ``best_head``.
        """
        if len(self.weights) > 1 or self._coded is False:
            return None
        ops = cast("BestOps", self.ops)
        codes = ops.best_outputs(x, self.weights[0], self.stop - self.start, self.scale)
        if self.comm.world > 1:
            codes = self._best_of_all(codes)
        return None if codes is None else LAST - (codes & 0xFFFFFFFF)

    def _best_of_all(self, codes: Tensor | None) -> Tensor | None:
        """Returns the largest code over all ranks; None if some rank has no codes."""
        if self._coded is None:
            # Kernels may differ between the ranks' machines.
            self._coded = bool(self.comm.least((int(codes is not None),))[0])
        if not self._coded or codes is None:
            return None
        return self.comm.all_gather((codes - self.start)[:, None]).amax(1)


class SamplingHead:
    """The output head and sampling."""

    def __init__(self, ops: Ops, lm_head: LMHead, best: bool = False) -> None:
        self.ops, self.lm_head, self.best = ops, lm_head, best

    def __call__(self, hidden: Tensor, inputs: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        """Samples from rows of ``hidden`` and records the ids in ``state``."""
        rows = self.ops.gather_rows(hidden, inputs.hidden_row)
        if self.best and not full and (token := self.lm_head.best(rows)) is not None:
            return cast("BestOps", self.ops).take(token, inputs, state)
        return self.ops.sample(self.lm_head(rows), inputs, state, full)

    def take_masked_best(self, hidden: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Takes the best ids that the masks allow."""
        logits = cast("MaskingOps", self.ops).mask(self._logits(hidden, inputs), inputs)
        return self.ops.sample(logits, inputs, state, False)

    def draw_without_logprobs(self, hidden: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Samples and returns only the ids."""
        return cast("DrawingOps", self.ops).draw(self._logits(hidden, inputs), inputs, state)

    def take_penalised_best(self, hidden: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Takes the best ids after penalties, bias and mask."""
        return cast("PenalisingOps", self.ops).take_penalised(self._logits(hidden, inputs), inputs, state)

    def score_top(self, hidden: Tensor, inputs: HeadTensors, count: int) -> HeadTensorsOut:
        """Returns the log-probabilities of the targets and of the ``count`` top ids; ``state`` does not change."""
        logprobs = self._logits(hidden, inputs).float().log_softmax(-1)
        target = inputs.target.long().clamp_min(0)
        own = logprobs.gather(1, target[:, None])
        rank = (logprobs > own).int().sum(-1) + 1
        top = logprobs.topk(count, dim=-1)
        return HeadTensorsOut(target.int(), own[:, 0].clone(), rank.int(), top.indices.int(), top.values)

    def _logits(self, hidden: Tensor, inputs: HeadTensors) -> Tensor:
        return self.lm_head(self.ops.gather_rows(hidden, inputs.hidden_row))
