"""Messages between the engine and its other ranks. Torch-free; never pickle. Arrays travel as (type, shape, bytes)."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from trencadis.core.buckets import Bucket
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.rank_info_and_fingerprint import RankFingerprint, RankInfo
from trencadis.core.links.group_key import TlsFiles
from trencadis.core.request import AdapterRef
from trencadis.core.step import Float64, Step
from trencadis.core.step_output import HeadOutput, Pooled, StepOutput, StepStats, TargetScores


class ConnectInfo(msgspec.Struct, tag=True):
    """Down, from the parent process: address and key of the engine to connect to; the engine then sends ``StartRank``.

    Args:
        key: the group's key; empty: ``key_file`` holds it and is read before each attempt.
        patience: seconds in which the engine must answer.
        model: the checkpoint's folder on this machine; empty: the same path as on the engine's machine.
        threads: requested CPU threads of all ranks of this machine.
    """

    address: str
    port: int
    rank: int
    local: int
    local_world: int
    key: bytes = b""
    key_file: str = ""
    tls: TlsFiles = TlsFiles()
    patience: float = 600.0
    model: str = ""
    threads: int | None = None

    def __repr__(self) -> str:
        return f"Dial({self.address}, {self.port}, rank {self.rank})"  # no key: crash reports may show it


class StartRank(msgspec.Struct, tag=True):
    """Down, first message of the engine: the configuration, the rank's info, and the factory of its runner."""

    config: EngineConfig
    rank_info: RankInfo
    factory: str


class RendezvousDone(msgspec.Struct, tag=True):
    """Down, to ranks of other machines: all ranks have joined with equal versions and checkpoints."""


class Shutdown(msgspec.Struct, tag=True):
    """Down, to ranks of other machines: the engine ends normally."""


class RunStep(msgspec.Struct, tag=True):
    """Down: the next Step, which every rank runs."""

    step: Step


class RunWarmup(msgspec.Struct, tag=True):
    """Down: run one unit of background warm-up."""


class ChangePlan(msgspec.Struct, tag=True):
    """Down: begin the change to plan ``version`` with these buckets; each ``RunWarmup`` then runs one piece of it."""

    version: int
    buckets: tuple[Bucket, ...]


class SetVocabulary(msgspec.Struct, tag=True):
    """Down: a packed ``grammar_tokenizer_and_vocabulary.Vocabulary``, sent before the first Step that needs it."""

    data: bytes


class CompileGrammar(msgspec.Struct, tag=True):
    """Down: compile a grammar while Steps continue; ``TaskDone`` answers with the same number."""

    number: int
    grammar: str


class LoadAdapter(msgspec.Struct, tag=True):
    """Down: read an adapter while Steps continue, and forget others; ``TaskDone`` answers with the same number."""

    number: int
    ref: AdapterRef
    drop: tuple[str, ...] = ()


class EngineReached(msgspec.Struct, tag=True):
    """Up, to the parent process: the engine has accepted the connection."""


class RendezvousJoined(msgspec.Struct, tag=True):
    """Up, from ranks of other machines: versions and checkpoint digest."""

    fingerprint: RankFingerprint


class RankReady(msgspec.Struct, tag=True):
    """Up: this rank is ready for Steps."""


class StepDone(msgspec.Struct, tag=True):
    """Up: a Step has run; ``digest`` covers what it sampled and its plan, and must be equal on all ranks."""

    number: int
    digest: int


class StepAnswer(msgspec.Struct, tag=True):
    """Up: the last pipeline stage's output of a Step; ``digest`` is that of ``StepDone``.

    ``pooled``: arrays [rows, width], each with its own dtype.
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
    text: list[tuple[int, int]]
    failed_at: dict[int, int] = {}
    forced: dict[int, tuple[int, ...]] = {}
    plan: int = 1

    @classmethod
    def of(cls, output: StepOutput) -> StepAnswer:
        """Converts a step's output to a message."""
        o, pooled = output, cast(dict[int, Float64], output.pooled)
        late = o.failures, [*o.text], o.failed_at, o.forced, o.plan
        return cls(o.number, digest(o), o.samples, o.head, o.targets, o.scored, pooled, o.stats, *late)

    def output(self) -> StepOutput:
        """Converts the message back to a step's output."""
        pooled = cast(dict[int, Pooled], self.pooled)
        late = self.failures, self.failed_at, set(self.text), self.forced, self.plan
        return StepOutput(self.number, self.samples, self.head, self.targets, self.scored, pooled, self.stats, *late)


class CaptureProgress(msgspec.Struct, tag=True):
    """Up: the capture of ``bucket`` begins or has ended, so that the engine can name it if this rank dies."""

    bucket: str
    begun: bool


class TaskDone(msgspec.Struct, tag=True):
    """Up: a grammar is compiled or an adapter is read; ``problem`` is an error message, or empty."""

    number: int
    problem: str


class RankFailure(msgspec.Struct, tag=True):
    """Up: this rank cannot continue; ``code`` 2 means a StartupError."""

    message: str
    code: int = 1


Down = (
    ConnectInfo
    | StartRank
    | RendezvousDone
    | Shutdown
    | RunStep
    | RunWarmup
    | ChangePlan
    | SetVocabulary
    | CompileGrammar
    | LoadAdapter
)
Up = EngineReached | RendezvousJoined | RankReady | StepDone | StepAnswer | CaptureProgress | TaskDone | RankFailure


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    raise TypeError(f"{type(value)} does not cross to another rank")


def _array(kind: type, value: tuple[str, tuple[int, ...], bytes]) -> NDArray[Any]:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
decode_down = msgspec.msgpack.Decoder(Down, dec_hook=_array).decode
decode_up = msgspec.msgpack.Decoder(Up, dec_hook=_array).decode


encode = _encoder.encode
"""Encodes a message as bytes."""


def without_pixels(step: Step) -> Step:
    """Returns ``step`` without pixels, for a rank that does not encode."""
    images = tuple(dataclasses.replace(image, pixels=image.pixels[:0]) for image in step.images)
    return dataclasses.replace(step, images=images)


def digest(output: StepOutput) -> int:
    """Returns a digest of the tokens that a Step sampled and of the version of its plan."""
    tokens = b"" if output.head is None else np.ascontiguousarray(output.head.token).tobytes()
    return zlib.crc32(tokens, output.plan)
