"""Token embedding and the output head, tied or not; sampling from the logits of the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from trencadis.core.checkpoint.weight_source import SharingOps, StackedPart, WeightSource
from trencadis.core.device.backend import AdapterRows, Comm, HeadTensors, HeadTensorsOut, Ops, SamplerState
from trencadis.core.models.linear import Linear, pad_rows, scaled, span

if TYPE_CHECKING:
    from trencadis.core.models.interface import BestOps, DrawingOps, MaskingOps, PenalisingOps

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
        y = scaled(super().__call__(x), self.scale)
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
        target = inputs.target.clamp_min(0)
        own = logprobs.gather(1, target[:, None])
        rank = (logprobs > own).int().sum(-1) + 1
        top = logprobs.topk(count, dim=-1)
        return HeadTensorsOut(target.int(), own[:, 0], rank.int(), top.indices.int(), top.values)

    def _logits(self, hidden: Tensor, inputs: HeadTensors) -> Tensor:
        return self.lm_head(self.ops.gather_rows(hidden, inputs.hidden_row))
