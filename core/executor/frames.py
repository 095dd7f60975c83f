"""Messages between the engine and its other ranks, and their framing. Torch-free; never pickle.

A frame is a little-endian uint32, the size of the msgpack message, and the message. Arrays travel as (type, shape,
bytes).
"""

from __future__ import annotations

import socket
import struct
import zlib
from typing import Any, cast

import msgspec
import numpy as np

from trencadis.core.config import EngineConfig
from trencadis.core.executor.ranks import Place
from trencadis.core.step import Float64, HeadOutput, Pooled, Step, StepOutput, StepStats, TargetScores

HEADER = struct.Struct("<I")


class Begin(msgspec.Struct, tag=True):
    """Down, first message: the configuration, the rank's place, and the factory of its runner."""

    config: EngineConfig
    place: Place
    factory: str


class Run(msgspec.Struct, tag=True):
    """Down: the Step that every rank runs next."""

    step: Step


class Warm(msgspec.Struct, tag=True):
    """Down: run one piece of background warm-up."""


class Words(msgspec.Struct, tag=True):
    """Down: a packed ``core.masks.vocabulary.Vocabulary``, before the first Step that needs it."""

    data: bytes


class Compile(msgspec.Struct, tag=True):
    """Down: compile a grammar beside the Steps; ``Compiled`` answers with the same number."""

    number: int
    grammar: str


class RankReady(msgspec.Struct, tag=True):
    """Up: this rank takes Steps."""


class Done(msgspec.Struct, tag=True):
    """Up: a Step has run; ``digest`` is that of the tokens it sampled, which must be equal on all ranks."""

    number: int
    digest: int


class StepAnswer(msgspec.Struct, tag=True):
    """Up: what the last pipeline stage made of a Step; ``digest`` as in ``Done``.

    ``pooled``: [rows, width], each in the type that it has.
    """

    number: int
    digest: int
    samples: dict[int, int]
    head: HeadOutput | None
    targets: dict[int, TargetScores]
    scored: dict[int, TargetScores]
    pooled: dict[int, Float64]
    stats: list[StepStats]
    failures: dict[int, str]
    text: list[int]

    @classmethod
    def of(cls, output: StepOutput) -> StepAnswer:
        """The frame of an output."""
        o, pooled = output, cast(dict[int, Float64], output.pooled)
        return cls(o.number, digest(o), o.samples, o.head, o.targets, o.scored, pooled, o.stats, o.failures, [*o.text])

    def output(self) -> StepOutput:
        """The output."""
        pooled = cast(dict[int, Pooled], self.pooled)
        text = set(self.text)
        return StepOutput(
            self.number, self.samples, self.head, self.targets, self.scored, pooled, self.stats, self.failures, text
        )


class Compiled(msgspec.Struct, tag=True):
    """Up: a grammar is compiled; ``problem`` says what is wrong with it, or is empty."""

    number: int
    problem: str


class RankFailure(msgspec.Struct, tag=True):
    """Up: this rank cannot go on; ``code`` 2 means a StartupError."""

    message: str
    code: int = 1


Down = Begin | Run | Warm | Words | Compile
Up = RankReady | Done | StepAnswer | Compiled | RankFailure


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    raise TypeError(f"{type(value)} does not cross to another rank")


def _array(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
decode_down = msgspec.msgpack.Decoder(Down, dec_hook=_array).decode
decode_up = msgspec.msgpack.Decoder(Up, dec_hook=_array).decode


def frame(message: Down | Up) -> bytes:
    """Header and message."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class LinkClosed(Exception):
    """The other process closed its end of the socket."""


def receive(sock: socket.socket) -> bytearray:
    """The next message.

    Raises:
        LinkClosed: the socket is closed.
    """
    (size,) = HEADER.unpack(_exactly(sock, HEADER.size))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        try:
            got = sock.recv_into(left)
        except OSError:
            raise LinkClosed from None
        if not got:
            raise LinkClosed
        left = left[got:]
    return data


def digest(output: StepOutput) -> int:
    """A digest of the tokens that a Step sampled; 0 if it sampled none."""
    return 0 if output.head is None else zlib.crc32(np.ascontiguousarray(output.head.token).tobytes()) or 1
