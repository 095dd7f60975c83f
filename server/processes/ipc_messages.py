"""Messages between the front process and an API process.

Frames are those of ``core/process/engine_messages.py``; payloads have any size. API processes use an engine's messages
for requests: Add, Abort, Media, VocabularyPart. The messages here are sent in addition.
"""

from __future__ import annotations

import msgspec

from trencadis.core.json_types import JsonObject
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta
from trencadis.server.config.resolve_settings import Settings


class ServeOrder(msgspec.Struct, tag=True):
    """Down, first message: what to serve, as which of ``count`` processes, and over which descriptors.

    Args:
        replicas: number of engines.
    """

    settings: Settings
    index: int
    count: int
    replicas: int
    listener: int
    table: int


class ReplicaState(msgspec.Struct, frozen=True):
    """State of one engine; the names are those of ``EngineClient``."""

    phase: str = "starting"
    accepting: bool = False
    healthy: bool = False
    ready: bool = False
    failing: bool = False
    stopping: bool = False
    restarts: int = 0
    sleep_level: int = 0
    sleep_operation: str = ""
    progress: engine_messages.Phase | None = None


class EngineStates(msgspec.Struct, tag=True):
    """Down: the engines' states, and their counters without the lists of new entries."""

    states: list[ReplicaState]
    stats: list[engine_messages.EngineStats]


class ReplicaInfo(msgspec.Struct, tag=True):
    """Down: the info that engine ``replica`` reported when ready, and its planned shapes; sent when they change."""

    replica: int
    info: engine_messages.EngineInfo | None
    plan: engine_messages.GraphPlan | None


class RequestRouted(msgspec.Struct, tag=True):
    """Down: request ``id`` was sent to engine ``replica`` of several."""

    id: str
    replica: int


class DeltaBatch(msgspec.Struct, tag=True):
    """Down: deltas of requests of this process."""

    items: list[Delta]


class ReloadOrder(msgspec.Struct, tag=True):
    """Down: read keys and certificates again."""


class LeaveOrder(msgspec.Struct, tag=True):
    """Down: accept no more connections, finish the answers within ``seconds``, then exit."""

    seconds: int


class ApiReady(msgspec.Struct, tag=True):
    """Up: the app is built and accepts connections.

    Args:
        max_model_len: from the configuration, before the engine reports its own; determines the sizes of histograms.
    """

    max_model_len: int


class ApiFailed(msgspec.Struct, tag=True):
    """Up: the process cannot start; ``code`` 2: the configuration is wrong."""

    message: str
    code: int


class FrontQuestion(msgspec.Struct, tag=True):
    """Both ways: a question ``method`` with arguments; a ``FrontReply`` with the same number follows."""

    number: int
    method: str
    arguments: JsonObject = {}


class FrontReply(msgspec.Struct, tag=True):
    """Both ways: the answer is the payload; or ``status`` and ``message`` of an error."""

    number: int
    status: int = 0
    message: str = ""
    retry_after: int | None = None


Down = (
    ServeOrder
    | EngineStates
    | ReplicaInfo
    | RequestRouted
    | DeltaBatch
    | engine_messages.NeedMedia
    | ReloadOrder
    | LeaveOrder
    | FrontQuestion
    | FrontReply
)
Requests = (
    engine_messages.Add
    | engine_messages.Abort
    | engine_messages.Media
    | engine_messages.MediaFailed
    | engine_messages.VocabularyPart
)
Up = (
    ApiReady
    | ApiFailed
    | Requests
    | engine_messages.ResetPrefixCache
    | engine_messages.ResetEncoderCache
    | FrontQuestion
    | FrontReply
)

_encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def make_frame(message: msgspec.Struct, payload: bytes | memoryview = b"") -> bytes:
    """Encodes header and message; the caller writes the payload after it."""
    body = _encoder.encode(message)
    return engine_messages.HEADER.pack(len(body), len(payload)) + body
