"""Bounds of every flag that takes a number. A flag without an entry here fails a test."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.request import MAX_LOGPROBS
from trencadis.server.config.config import ServerConfig
from trencadis.server.config.flags import Flag, table

WHOLE = ("int", "count", "bytes")
NUMBERS = (*WHOLE, "float")
MOST = 2**31 - 1
MOST_BYTES = 2**60
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Bound:
    """From ``least`` to ``most``; ``above``: ``least`` itself is too little."""

    least: float
    most: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """False for a NaN too."""
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def rule(self, value: float) -> str:
        """What ``value`` breaks."""
        if value <= 0 and (self.least == 1 or (self.least == 0 and self.above and self.most > 1)):
            return f"must be positive, got {value:g}."
        return f"must be in {'(' if self.above else '['}{self.least:.16g}, {self.most:.16g}], got {value:g}."


COUNT, BYTES = Bound(1, MOST), Bound(1, MOST_BYTES)
SECONDS, SOME_SECONDS, SHARE = Bound(0, 365 * DAY), Bound(0, 365 * DAY, above=True), Bound(0, 1)
BOUNDS: dict[str, Bound] = {
    "seed": Bound(-(2**63), 2**63 - 1), "max_model_len": COUNT, "tensor_parallel_size": Bound(1, 1024),
    "gpu_memory_utilization": Bound(0, 1, above=True), "graph_reserved_mem": SHARE, "graph_prompt_ratio": SHARE,
    "graph_multimodal_prompt_ratio": SHARE, "warmup_stall": SHARE, "warmup_slice": SECONDS,
    "kv_cache_memory_bytes": BYTES, "block_size": Bound(1, 65536), "num_gpu_blocks_override": COUNT,
    "max_num_batched_tokens": COUNT, "max_num_seqs": Bound(1, 65536), "priority_aging": SOME_SECONDS,
    "async_depth": Bound(0, 1), "encoder_cache_images": Bound(2, 65536), "mm_processor_cache_gb": Bound(0, 2**20),
    "max_logprobs": Bound(0, MAX_LOGPROBS), "threads": Bound(1, 4096), "port": Bound(0, 65535),
    "ssl_cert_reqs": Bound(0, 2), "max_image_pixels": COUNT, "image_fetch_timeout": SOME_SECONDS,
    "max_media_bytes": BYTES, "video_fetch_timeout": SOME_SECONDS, "max_video_frames": COUNT,
    "max_video_seconds": SOME_SECONDS, "max_num_queued_reqs": Bound(0, MOST), "max_num_queued_tokens": COUNT,
    "max_num_queued_pixels": BYTES, "max_body_bytes": BYTES, "max_queued_body_bytes": BYTES,
    "shutdown_timeout": SECONDS, "drain_delay": SECONDS, "receive_timeout": SECONDS, "max_connections": COUNT,
    "max_engine_restarts": Bound(0, MOST), "compile_timeout": SOME_SECONDS, "timeout_keep_alive": Bound(0, 365 * DAY),
    "h11_max_incomplete_event_size": Bound(1024, 2**30), "sse_keep_alive_interval": SECONDS,
}  # fmt: skip
"""Field name -> what its flag may be."""


def numeric() -> list[Flag]:
    """The flags that take a number."""
    return [flag for flag in table().values() if flag.kind in NUMBERS]


def check(config: EngineConfig | ServerConfig) -> None:
    """Every number of ``config`` within its bounds.

    Raises:
        StartupError: names the first flag whose value is not, and the bounds.
    """
    flags = table()
    for field in dataclasses.fields(config):
        if field.name in BOUNDS:
            _check(flags[field.name], getattr(config, field.name))


def _check(flag: Flag, value: Any) -> None:
    if value is None and flag.optional:
        return
    kinds = (int,) if flag.kind in WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, float) and math.isnan(value)):
        kind = "a whole number" if flag.kind in WHOLE else "a number"
        raise StartupError(f"{flag.written} must be {kind}, got {value!r}.")
    bound = BOUNDS[flag.name]
    if not bound.holds(value):
        raise StartupError(f"{flag.written} {bound.rule(value)}")
