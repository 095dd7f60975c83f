"""Messages between the front and an API process. Frames are those of ``core/process/wire.py``; payloads have any size.

To the front an API process speaks as a server speaks to its engine: Add, Abort, Media, VocabularyPart. What is here
comes beside that.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trencadis.core.process import wire
from trencadis.core.request import Delta
from trencadis.server.config.settings import Settings


class Serve(msgspec.Struct, tag=True):
    """Down, first message: what to serve, as which of ``count`` processes, and over which descriptors.

    Args:
        replicas: engines behind the front.
    """

    settings: Settings
    index: int
    count: int
    replicas: int
    listener: int
    table: int


class ReplicaState(msgspec.Struct, frozen=True):
    """One engine as the front sees it; the names are those of ``EngineClient``."""

    phase: str = "starting"
    accepting: bool = False
    healthy: bool = False
    ready: bool = False
    failing: bool = False
    stopping: bool = False
    restarts: int = 0
    sleep_level: int = 0
    under_way: str = ""
    progress: wire.Phase | None = None


class EngineStates(msgspec.Struct, tag=True):
    """Down: the engines' states, and their counters without the lists of what is new."""

    states: list[ReplicaState]
    stats: list[wire.EngineStats]


class Known(msgspec.Struct, tag=True):
    """Down: what engine ``replica`` was ready with, and its planned shapes; sent when they change."""

    replica: int
    info: wire.EngineInfo | None
    plan: wire.GraphPlan | None


class Placed(msgspec.Struct, tag=True):
    """Down: request ``id`` was sent to engine ``replica`` of several."""

    id: str
    replica: int


class Produced(msgspec.Struct, tag=True):
    """Down: deltas of requests of this process."""

    items: list[Delta]


class Reload(msgspec.Struct, tag=True):
    """Down: read keys and certificates again."""


class Leave(msgspec.Struct, tag=True):
    """Down: take no more connections, finish the answers within ``seconds``, then exit."""

    seconds: int


class Built(msgspec.Struct, tag=True):
    """Up: the app is built and takes connections.

    Args:
        max_model_len: before the engine reports its own; the sizes of histograms follow from it.
    """

    max_model_len: int


class Failed(msgspec.Struct, tag=True):
    """Up: the process cannot start; ``code`` 2: the configuration is at fault."""

    message: str
    code: int


class Question(msgspec.Struct, tag=True):
    """Both ways: asks ``what``, with what it needs to be answered; a ``Reply`` with the same number follows."""

    n: int
    what: str
    given: dict[str, Any] = {}


class Reply(msgspec.Struct, tag=True):
    """Both ways: the answer is the payload; or ``status`` and ``message`` of an error."""

    n: int
    status: int = 0
    message: str = ""
    retry_after: int | None = None


Down = Serve | EngineStates | Known | Placed | Produced | wire.NeedMedia | Reload | Leave | Question | Reply
Requests = wire.Add | wire.Abort | wire.Media | wire.MediaFailed | wire.VocabularyPart
Up = Built | Failed | Requests | wire.ResetPrefixCache | wire.ResetEncoderCache | Question | Reply

_encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def frame(message: msgspec.Struct, payload: bytes | memoryview = b"") -> bytes:
    """Header and message; the caller writes the payload after it."""
    body = _encoder.encode(message)
    return wire.HEADER.pack(len(body), len(payload)) + body
