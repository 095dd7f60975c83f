"""The seconds of one launch: what it reads and writes, what it computes, and what comes before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.backends.cuda.timing.constants import CardTimes

PRODUCT, ATTENTION, ROWS, HEAD, COLLECTIVE = "products", "attention", "small kernels", "head", "collectives"
KINDS = (PRODUCT, ATTENTION, ROWS, HEAD, COLLECTIVE)


@dataclass(frozen=True)
class RecordedKernel:
    """One kernel of a recorded launch; a collective's ``bytes`` are those of its message."""

    name: str
    kind: str
    bytes: int
    flops: int = 0


def seconds(kernel: RecordedKernel, card: CardTimes) -> float:
    """Seconds that the kernel runs: the longer of reading and computing."""
    if kernel.kind == COLLECTIVE:
        return card.all_reduce + card.all_reduce_byte * kernel.bytes
    share = {PRODUCT: card.weights_share, ATTENTION: card.keys_share}.get(kernel.kind, card.rows_share)
    computing = card.attention_flops_share if kernel.kind == ATTENTION else card.flops_share
    return max(kernel.bytes / (card.bandwidth * share), kernel.flops / (card.flops * computing))


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of the kernels of a recorded step by their kind, and of what lies between them."""

    kinds: dict[str, float]
    gaps: float

    @property
    def total(self) -> float:
        """Seconds of the device."""
        return sum(self.kinds.values()) + self.gaps


def time_of(kernels: list[RecordedKernel], card: CardTimes) -> KernelTimes:
    """Seconds of recorded kernels that is replayed as one graph for each of its launches."""
    kinds = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        kinds[kernel.kind] += seconds(kernel, card)
    return KernelTimes(kinds, len(kernels) * card.gap)
