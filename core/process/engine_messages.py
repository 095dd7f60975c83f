"""Messages between the API process and the engine process, and their framing. Torch-free; never pickle.

A frame is two little-endian uint32 (bytes of the message, bytes of the payload), the msgpack message, the payload.
``Media`` and ``VocabularyPart`` carry a payload: up to ``CHUNK`` bytes of pixels, or of the packed vocabulary.
"""

from __future__ import annotations

import struct

import msgspec

from trencadis.core.engine_config import EngineConfig
from trencadis.core.engine_stats import BucketUse as BucketUse
from trencadis.core.engine_stats import EngineInfo as EngineInfo
from trencadis.core.engine_stats import EngineStats as EngineStats
from trencadis.core.engine_stats import GraphCounters as GraphCounters
from trencadis.core.graph_and_bucket_learning_report import BucketState as BucketState
from trencadis.core.graph_and_bucket_learning_report import GraphPlan as GraphPlan
from trencadis.core.graph_and_bucket_learning_report import LearningReport as LearningReport
from trencadis.core.request import Delta, Request

HEADER = struct.Struct("<II")
CHUNK = 1 << 20
MAX_MESSAGE = 256 << 20


class Start(msgspec.Struct, tag=True):
    """Down, first message: the configuration to serve."""

    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    """Down: a new request; its pixels are sent in reply to NeedMedia."""

    request: Request


class Media(msgspec.Struct, tag=True):
    """Down: bytes [offset, offset + payload) of ``total`` pixel bytes of media ``index`` of request ``id``."""

    id: str
    index: int
    offset: int
    total: int


class VocabularyPart(msgspec.Struct, tag=True):
    """Down: bytes [offset, offset + payload) of the ``total`` bytes of a packed
    ``grammar_tokenizer_and_vocabulary.Vocabulary``.

    They are sent once, before the first request whose rule has a grammar.
    """

    offset: int
    total: int


class MediaFailed(msgspec.Struct, tag=True):
    """Down: the pixels cannot be sent; the request ends with this error."""

    id: str
    index: int
    status: int
    message: str


class Abort(msgspec.Struct, tag=True):
    """Down: end these requests, or only choice ``choice`` of them."""

    ids: list[str]
    choice: int = -1


class Drain(msgspec.Struct, tag=True):
    """Down: finish the running requests, then exit."""


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Down: drop all cached blocks."""


class ResetEncoderCache(msgspec.Struct, tag=True):
    """Down: drop the embeddings of images that no running request needs."""


class LearnBuckets(msgspec.Struct, tag=True):
    """Down: search for better shapes; ``force``: change to what is found, whatever it gains."""

    force: bool = False


class Ping(msgspec.Struct, tag=True):
    """Down: the engine's reader thread answers with Pong."""

    n: int


class Phase(msgspec.Struct, tag=True):
    """Up: a start-up phase has begun (``seconds`` since the process started); ``fraction`` of it is done."""

    name: str
    detail: str = ""
    seconds: float = 0.0
    fraction: float = 0.0
    done: int = 0
    total: int = 0
    eta: float = 0.0


class Capture(msgspec.Struct, tag=True):
    """Up: the capture of a bucket begins or has ended; if the engine dies in between, the next one skips the bucket."""

    bucket: str
    begun: bool


class Ready(msgspec.Struct, tag=True):
    """Up: the engine accepts requests; ``info`` has the sizes that it started with."""

    info: EngineInfo


class Deltas(msgspec.Struct, tag=True):
    """Up: the outputs of a step."""

    items: list[Delta]
    stats: EngineStats | None = None


class NeedMedia(msgspec.Struct, tag=True):
    """Up: send the pixels of media ``index`` of request ``id``."""

    id: str
    index: int


class Fatal(msgspec.Struct, tag=True):
    """Up: the engine cannot start or continue; ``code`` 2: the configuration is at fault (a StartupError).

    ``capture``: the bucket during whose capture a rank died; another engine may start without it.
    """

    message: str
    code: int = 1
    capture: str = ""


class Pong(msgspec.Struct, tag=True):
    """Up: the reader thread is alive; the engine is in ``phase``, ``seconds`` into step ``step``."""

    n: int
    phase: str
    step: int
    seconds: float


Resets = ResetPrefixCache | ResetEncoderCache
Down = Start | Add | Media | VocabularyPart | MediaFailed | Abort | Drain | Resets | LearnBuckets | Ping
Up = Phase | Capture | Ready | Deltas | NeedMedia | Fatal | Pong

_encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def frame(message: Down | Up, payload: bytes | memoryview = b"") -> bytes:
    """Returns header and message; the caller writes the payload after it, so that pixels are not copied."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body), len(payload)) + body
