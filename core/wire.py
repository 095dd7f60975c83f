"""Messages between the API process and the engine process, and their framing. Torch-free; never pickle.

A frame is two little-endian uint32 (bytes of the message, bytes of the payload), the msgpack message, the payload.
Only ``Media`` carries a payload: up to ``CHUNK`` bytes of pixels.
"""

from __future__ import annotations

import struct

import msgspec

from trencadis.core.config import EngineConfig
from trencadis.core.progress import Warming
from trencadis.core.request import Delta, Request

HEADER = struct.Struct("<II")
CHUNK = 1 << 20
MAX_MESSAGE = 256 << 20


class Start(msgspec.Struct, tag=True):
    """Down, first: what to serve."""

    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    """Down: a new request; its pixels stay behind until NeedMedia asks for them."""

    request: Request


class Media(msgspec.Struct, tag=True):
    """Down: bytes [offset, offset + payload) of ``total`` pixel bytes of media ``index`` of request ``id``."""

    id: str
    index: int
    offset: int
    total: int


class MediaFailed(msgspec.Struct, tag=True):
    """Down: the pixels cannot be had again; the request ends with this error."""

    id: str
    index: int
    status: int
    message: str


class Abort(msgspec.Struct, tag=True):
    """Down: these requests (all choices, or one choice ``id``/``choice``) are no longer wanted."""

    ids: list[str]
    choice: int = -1


class Drain(msgspec.Struct, tag=True):
    """Down: finish what runs, then exit."""


class Ping(msgspec.Struct, tag=True):
    """Down: answered by the engine's reader thread."""

    n: int


class Phase(msgspec.Struct, tag=True):
    """Up: a start-up phase has begun (``seconds`` since the process started), with ``fraction`` of it done."""

    name: str
    detail: str = ""
    seconds: float = 0.0
    fraction: float = 0.0
    done: int = 0
    total: int = 0
    eta: float = 0.0


class Capture(msgspec.Struct, tag=True):
    """Up: the capture of a bucket begins, or has ended; an engine that dies in between must skip it next time."""

    bucket: str
    begun: bool


class BucketState(msgspec.Struct, array_like=True):
    """One planned bucket; ``bytes`` is its graph's measured cost, else what is predicted."""

    name: str
    stage: str
    dims: list[int]
    variant: str
    pool: str
    state: str
    bytes: int
    measured: bool = False
    failed: str = ""


class GraphPlan(msgspec.Struct):
    """Every planned bucket and where the device's bytes go; ledger rows sum to ``total``."""

    version: int
    buckets: list[BucketState] = msgspec.field(default_factory=list)
    ledger: list[tuple[str, int]] = msgspec.field(default_factory=list)
    total: int = 0
    pools: dict[str, tuple[int, int, int]] = msgspec.field(default_factory=dict)
    """Pool -> (budget, spent on graphs, not returned), bytes."""
    warmup: str = ""
    advice: list[str] = msgspec.field(default_factory=list)


class GraphCounters(msgspec.Struct):
    """What happened to graphs since the engine's start."""

    lazy_compiles: int = 0
    recompiles: int = 0
    bytes: dict[str, int] = msgspec.field(default_factory=dict)
    warming: Warming | None = None


class BucketUse(msgspec.Struct, array_like=True):
    """One launch: real and padded tokens, slots or rows; the rest as in ``StepStats``."""

    stage: str
    real: int
    padded: int
    seconds: float
    bucket: str = ""
    state: str = ""
    planned: bool = True
    miss: str = ""
    items: int = 0
    needed: int = 0


class EngineInfo(msgspec.Struct, tag=True):
    """Up: the engine accepts requests; what it came up with."""

    device: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    arena_rows: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    arena_bytes: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    """Predicted for the largest step; 0: unknown. A step far above it is a hang."""
    notes: list[str] = msgspec.field(default_factory=list)
    graphs: GraphPlan | None = None


class EngineStats(msgspec.Struct):
    """Counters and gauges of the engine, cumulative since its start."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    kv_cached: int = 0
    """Blocks whose content can be found again, in use or not."""
    kv_evictions: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    mm_queries: int = 0
    mm_hits: int = 0
    arena_used: int = 0
    arena_total: int = 0
    images_encoded: int = 0
    image_evictions: int = 0
    step_tokens: list[int] = msgspec.field(default_factory=list)
    """Tokens of each step since the last message."""
    buckets: list[BucketUse] = msgspec.field(default_factory=list)
    """Each launch since the last message."""
    graphs: GraphCounters = msgspec.field(default_factory=GraphCounters)
    plan: GraphPlan | None = None
    """The plan, where a state changed since the last message."""


class Deltas(msgspec.Struct, tag=True):
    """Up: what a step produced."""

    items: list[Delta]
    stats: EngineStats | None = None


class NeedMedia(msgspec.Struct, tag=True):
    """Up: send the pixels of media ``index`` of request ``id``."""

    id: str
    index: int


class Fatal(msgspec.Struct, tag=True):
    """Up: the engine cannot start or go on; ``code`` 2 means the user's doing (a StartupError)."""

    message: str
    code: int = 1


class Pong(msgspec.Struct, tag=True):
    """Up: the reader thread is alive; the engine is in ``phase``, ``seconds`` into step ``step``."""

    n: int
    phase: str
    step: int
    seconds: float


Down = Start | Add | Media | MediaFailed | Abort | Drain | Ping
Up = Phase | Capture | EngineInfo | Deltas | NeedMedia | Fatal | Pong

_encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def frame(message: Down | Up, payload: bytes | memoryview = b"") -> bytes:
    """Header and message; the payload is written after it by the caller (so that pixels are not copied)."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body), len(payload)) + body
