"""Copies between the host and a program's static tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.inputs import arrays
from trencadis.backends.hpu.launches.trees import leaves, rebuilt
from trencadis.core.backend import HeadTensorsOut, Inputs
from trencadis.core.buckets import Bucket
from trencadis.core.step import HeadOutput


class StaticInputs:
    """A bucket's input tensors, which stay where they are on the card.

    Args:
        vocab: ids of the vocabulary, which size the masks and counts of the sampler.
    """

    def __init__(self, bucket: Bucket, bridge: Bridge, block_size: int, vocab: int) -> None:
        self.bucket, self.block_size, self.vocab = bucket, block_size, vocab
        blank = arrays(bucket, None, block_size, vocab)
        self._sent = leaves(blank)
        self.tensors: Any = rebuilt(blank, lambda a: torch.from_numpy(a).to(bridge.device))
        self.bytes = sum(t.numel() * t.element_size() for t in leaves(self.tensors))

    def fill(self, inputs: Inputs | None) -> None:
        """Queues copies of the host arrays that differ from those sent last.

        Arrays are made anew each time, so none is refilled before its copy has run.
        """
        filled = leaves(arrays(self.bucket, inputs, self.block_size, self.vocab))
        for target, last, source in zip(leaves(self.tensors), self._sent, filled, strict=True):
            if not np.array_equal(last, source):
                target.copy_(torch.from_numpy(source), non_blocking=True)
        self._sent = filled


class HpuPending:
    """Outputs on the host; ``core.backend.Pending``.

    The copies block. One into ordinary memory that does not is finished by a thread of the plug-in, of which no event
    tells: what is read after the event may be what the memory held before.
    """

    def __init__(self, out: HeadTensorsOut, rows: int) -> None:
        self._out = HeadOutput(*(None if t is None else t.cpu()[:rows].numpy() for t in out))  # type: ignore[arg-type]

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        return True

    def result(self) -> HeadOutput:
        """What was copied."""
        return self._out
