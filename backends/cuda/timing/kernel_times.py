"""The seconds of one launch: reads and writes, computation, and the gap before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.backends.cuda.timing.constants import CardTimes

PRODUCT, ATTENTION, ROWS, HEAD, COLLECTIVE = "products", "attention", "small kernels", "head", "collectives"
KINDS = (PRODUCT, ATTENTION, ROWS, HEAD, COLLECTIVE)


@dataclass(frozen=True)
class RecordedKernel:
    """One kernel of a recorded launch; for a collective, ``bytes`` are those of its message."""

    name: str
    kind: str
    bytes: int
    flops: int = 0


def seconds(kernel: RecordedKernel, card: CardTimes) -> float:
    """Returns the seconds that the kernel runs: the longer of memory traffic and computation."""
    if kernel.kind == COLLECTIVE:
        return card.all_reduce + card.all_reduce_byte * kernel.bytes
    share = {PRODUCT: card.weights_share, ATTENTION: card.keys_share}.get(kernel.kind, card.rows_share)
    computing = card.attention_flops_share if kernel.kind == ATTENTION else card.flops_share
    return max(kernel.bytes / (card.bandwidth * share), kernel.flops / (card.flops * computing))


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of the kernels of a recorded step by kind, and of the gaps between them."""

    kinds: dict[str, float]
    gaps: float

    @property
    def total(self) -> float:
        """Total seconds of the device."""
        return sum(self.kinds.values()) + self.gaps


def time_of(kernels: list[RecordedKernel], card: CardTimes) -> KernelTimes:
    """Returns the seconds of recorded kernels that are replayed as one graph per launch."""
    kinds = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        kinds[kernel.kind] += seconds(kernel, card)
    return KernelTimes(kinds, len(kernels) * card.gap)
