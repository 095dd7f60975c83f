"""Settings with which a start-up that does not fit would, the mildest first. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, TypeVar

from trencadis.core.buckets import Policy
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.quant_config import ONLINE, online
from trencadis.core.checkpoint.registry import family_of
from trencadis.core.config import EngineConfig
from trencadis.core.executor.rank_info import can_share
from trencadis.core.memory.estimate import MemoryEstimator
from trencadis.core.shapes.shape_limits import ShapeLimits

MORE_RANKS = (2, 4, 8, 16)
GIB = 1 << 30


class PlannedStart(Protocol):
    """The start-up that does not fit; ``dry_run.DryRun`` is one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def device(self) -> Any: ...

    @property
    def estimator(self) -> MemoryEstimator: ...


S = TypeVar("S", bound=PlannedStart)


def list_remedies(start: S, limits: ShapeLimits, blocks: int) -> Iterator[tuple[str, S]]:
    """Flags, and ``start`` with them: less work at a time, quantised weights, weights in host memory, more devices.

    ``blocks``: KV blocks that the device holds.
    """

    def change(**fields: Any) -> S:
        return dataclasses.replace(start, config=dataclasses.replace(start.config, **fields))

    if blocks > 0:
        length = blocks * limits.block_size
        yield f"--max-model-len {length}", change(max_model_len=length)
    for name, values, now in (
        ("max_num_seqs", (128, 64, 32, 16, 8, 4, 2), limits.max_rows),
        ("max_num_batched_tokens", (16384, 8192, 4096, 2048), limits.max_tokens),
        ("encoder_cache_images", (8, 4, 2), limits.units),
    ):
        for value in (v for v in values if v < now):
            yield f"--{name.replace('_', '-')} {value}", change(**{name: value})
    if start.model.quant is None:
        for kind in ONLINE:
            changed = dataclasses.replace(change(quantization=kind), model=quantise_model(start.model, kind))
            yield f"--quantization {kind}", changed
    if start.policy.host_weights:
        for size in (2**n for n in range(1, 10)):
            if size * GIB < start.estimator.weights():
                yield f"--cpu-offload-gb {size}", change(cpu_offload_gb=float(size))
    for ranks in (n for n in MORE_RANKS if n > start.device.ranks and can_share(start.model, n)):
        device = dataclasses.replace(start.device, ranks=ranks)
        yield f"--tensor-parallel-size {ranks}", dataclasses.replace(start, device=device)


def quantise_model(model: ModelConfig, kind: str) -> ModelConfig:
    """``model`` with the weights that ``--quantization kind`` makes as they load."""
    names = family_of(model.architecture).names
    rules = dataclasses.replace(online(kind), prefixes=tuple(names.prefixes.items()), inner=names.inner)
    return dataclasses.replace(model, quant=rules)
