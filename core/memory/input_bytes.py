"""Bytes of a launch's input tensors. Pure."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.core.buckets import Bucket, InputSizes, Policy, Stage, padded_tokens
from trencadis.core.request import MAX_BIAS


def any_inputs(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns the bytes of a bucket's input tensors by a general formula, for policies without their own."""
    stage, dims, vocab = bucket.stage, bucket.dims, sizes.vocab
    bits = -(-vocab // 8)
    if stage is Stage.VISION:
        mixed = 8 * sizes.slot.position_neighbours
        return dims[0] * (sizes.slot.values + 8 + mixed) + dims[0] // 8 + 8 * (dims[0] // sizes.slot.cell)
    if stage is Stage.SAMPLE:
        return dims[0] * 64 + bits * (1 if bucket.variant == "greedy" else dims[0] + 1)
    if stage is Stage.POOL:
        return dims[0] * 12
    if stage is Stage.RESET:
        return dims[0] * (8 + 4 * vocab + bits + MAX_BIAS * 12)
    return padded_tokens(bucket) * 44 + dims[-1] * 12


def attending(policy: Policy, library: str) -> Callable[[Bucket, InputSizes], int]:
    """Returns a function for the bytes of a bucket's inputs plus the workspace of an attention library.

    ``library`` is a value of `--attention-backend`.
    """
    inputs, beside = policy.inputs or any_inputs, policy.attention.get(library)
    return inputs if beside is None else lambda bucket, sizes: inputs(bucket, sizes) + beside(bucket, sizes)
