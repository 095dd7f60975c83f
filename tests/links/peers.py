"""Ranks that come to an engine over TCP: threads of this process, which speak the protocol and compute nothing."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tests.fakes import ranks as fake_ranks
from trencadis.core.config import EngineConfig
from trencadis.core.executor import frames
from trencadis.core.executor.dial import dialled
from trencadis.core.executor.facts import Facts, facts_of
from trencadis.core.executor.mp import Multiproc
from trencadis.core.executor.nodes import NodesLauncher
from trencadis.core.links.door import Door
from trencadis.core.links.keyed import KeyedLink, Pulse
from trencadis.core.links.link import LinkClosed
from trencadis.core.links.secret import GroupKey
from trencadis.core.links.tls import TlsFiles
from trencadis.core.links.topology import Topology

FACTORY = "tests.fakes.ranks:make"


class Peer:
    """A rank that answers as ``tests.fakes.ranks`` does.

    Attributes:
        steps: what it was told.
        why: how its link ended.
    """

    def __init__(
        self,
        key: GroupKey,
        address: tuple[str, int],
        number: int,
        facts: Facts | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.steps: list[frames.Run] = []
        self.why = ""
        self.said_goodbye = False
        self._facts = facts
        self._dial = frames.Dial(*address, number, number, 2, key=key.hand_over(), patience=5.0, tls=tls or TlsFiles())
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            link = dialled(self._dial)
        except Exception as error:
            self.why = str(error)
            return
        pulse = Pulse(lambda: link.beat(True))
        try:
            self._serve(link)
        except LinkClosed as error:
            self.why = str(error)
        finally:
            pulse.end()
            link.close()

    def _serve(self, link: KeyedLink) -> None:
        rank = fake_ranks.FakeRank("", frames.Place(self._dial.rank, 2))
        while True:
            match frames.decode_down(link.receive()):
                case frames.Begin(config):
                    link.send(frames.encode(frames.Met(self._facts or facts_of(config.model))))
                case frames.Go():
                    link.send(frames.encode(frames.RankReady()))
                case frames.Run(step) as told:
                    self.steps.append(told)
                    output = rank.execute(step).result()
                    link.send(frames.encode(frames.Done(step.number, frames.digest(output))))
                case frames.Warm():
                    rank.warm()
                case frames.End():
                    self.said_goodbye = True
                    return


def group_at(door: Door, world: int = 2, mode: str = "", **config: object) -> Multiproc:
    """The engine's side of ``world`` ranks on as many machines, this one among them."""
    made = replace(EngineConfig(policy=mode, tensor_parallel_size=world, nnodes=world), **config)  # type: ignore[arg-type]
    launcher = NodesLauncher(made, Topology("mp", world, world), door, "tcp://127.0.0.1:9")
    return Multiproc(made, FACTORY, launcher)


def start(group: Multiproc) -> None:
    group.start(lambda place: fake_ranks.make(group._config, place))


@contextmanager
def nothing_stays(children: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Threads, descriptors and processes are as many afterwards as before."""
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), children()
    yield
    end = time.monotonic() + 5
    while True:
        gc.collect()
        now = threading.active_count(), len(os.listdir("/proc/self/fd")), children()
        if all(a <= b for a, b in zip(now, before, strict=True)):
            return
        if time.monotonic() > end:
            raise AssertionError(f"{now} threads, descriptors and processes, before {before}")
        time.sleep(0.05)


@contextmanager
def recorded(monkeypatch: object) -> Iterator[None]:
    """Every message that a decoder sees was sent as it is, once: nothing unauthenticated reaches msgpack."""
    sent: list[bytes] = []
    lock = threading.Lock()
    real_send, real_up, real_down = KeyedLink.send, frames.decode_up, frames.decode_down

    def send(self: KeyedLink, body: bytes) -> None:
        with lock:
            sent.append(bytes(body))
        real_send(self, body)

    def check(body: bytes) -> None:
        with lock, suppress(ValueError):
            sent.remove(bytes(body))
            return
        raise AssertionError("bytes were decoded that nobody sent")

    def up(body: bytes) -> object:
        check(body)
        return real_up(body)

    def down(body: bytes) -> object:
        check(body)
        return real_down(body)

    patch = monkeypatch
    patch.setattr(KeyedLink, "send", send)  # type: ignore[attr-defined]
    patch.setattr(frames, "decode_up", up)  # type: ignore[attr-defined]
    patch.setattr(frames, "decode_down", down)  # type: ignore[attr-defined]
    yield
