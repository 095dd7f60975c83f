"""Messages between the engine and its other ranks. Torch-free; never pickle. Arrays travel as (type, shape, bytes)."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, cast

import msgspec
import numpy as np

from trencadis.core.config import EngineConfig
from trencadis.core.executor.facts import Facts
from trencadis.core.executor.ranks import Place
from trencadis.core.links.tls import TlsFiles
from trencadis.core.step import Float64, HeadOutput, Pooled, Step, StepOutput, StepStats, TargetScores


class Dial(msgspec.Struct, tag=True):
    """Down, from who started the process: where its engine is. The engine itself sends ``Begin`` then.

    Args:
        key: the group's, or empty: it is in ``key_file``, which is read again before each attempt.
        patience: seconds in which the engine must answer.
        model: the checkpoint's folder on this machine; empty: the engine's path holds here too.
        threads: CPU threads asked for all ranks of this machine.
    """

    address: str
    port: int
    rank: int
    local: int
    beside: int
    key: bytes = b""
    key_file: str = ""
    tls: TlsFiles = TlsFiles()
    patience: float = 600.0
    model: str = ""
    threads: int | None = None

    def __repr__(self) -> str:
        return f"Dial({self.address}, {self.port}, rank {self.rank})"  # a report of a crash may show it: no key


class Begin(msgspec.Struct, tag=True):
    """Down, first message of the engine: the configuration, the rank's place, and the factory of its runner."""

    config: EngineConfig
    place: Place
    factory: str


class Go(msgspec.Struct, tag=True):
    """Down, to ranks of other machines: all have met, and none has another version or checkpoint."""


class End(msgspec.Struct, tag=True):
    """Down, to ranks of other machines: the engine ends as it should."""


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


class Linked(msgspec.Struct, tag=True):
    """Up, to who started the process: the engine has answered."""


class Met(msgspec.Struct, tag=True):
    """Up, from ranks of other machines: what they would load, and with what."""

    facts: Facts


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


class Capturing(msgspec.Struct, tag=True):
    """Up: the capture of ``bucket`` begins, or has ended, so that the engine knows it if this rank dies."""

    bucket: str
    begun: bool


class Compiled(msgspec.Struct, tag=True):
    """Up: a grammar is compiled; ``problem`` says what is wrong with it, or is empty."""

    number: int
    problem: str


class RankFailure(msgspec.Struct, tag=True):
    """Up: this rank cannot go on; ``code`` 2 means a StartupError."""

    message: str
    code: int = 1


Down = Dial | Begin | Go | End | Run | Warm | Words | Compile
Up = Linked | Met | RankReady | Done | StepAnswer | Capturing | Compiled | RankFailure


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


encode = _encoder.encode
"""The bytes of a message."""


def without_pixels(step: Step) -> Step:
    """``step`` for a rank that does not encode."""
    images = tuple(dataclasses.replace(image, pixels=image.pixels[:0]) for image in step.images)
    return dataclasses.replace(step, images=images)


def digest(output: StepOutput) -> int:
    """A digest of the tokens that a Step sampled; 0 if it sampled none."""
    return 0 if output.head is None else zlib.crc32(np.ascontiguousarray(output.head.token).tobytes()) or 1
