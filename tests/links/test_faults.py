"""A rank over TCP: whatever happens to a frame, to the link or to a process ends the group, soon and without traces."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.ranks import full_step
from tests.links.peers import Peer, group_at, nothing_stays, recorded, start
from tests.links.proxy import FAULTS, Relay
from trencadis.core.executor.multiproc_executor import RankFailed
from trencadis.core.links import authenticated_link
from trencadis.core.links.authenticated_link import KeyedLink
from trencadis.core.links.group_key import GroupKey
from trencadis.core.links.message_link import BEAT, LinkClosed
from trencadis.core.links.rank_listener import AuthListener

SOON = 6.0
"""Seconds in which open requests must have ended: silence counts as death after 5."""

WORDS = {
    "flip": "altered", "cut": "closed its connection|altered|reset", "replay": "came where", "skip": "came where",
    "swap": "came where", "huge": "altered", "drop": "no sign of life|hears nothing",
}  # fmt: skip
"""What is said of each fault. One that the rank notices first is a closed connection to the engine."""


def run(fault: str, seed: int, monkeypatch: Any) -> float:
    """One group that meets ``fault``; returns the seconds until its caller knew."""
    rng, key = random.Random(f"{fault} {seed}"), GroupKey.generate()
    down, at = rng.random() < 0.5, rng.randrange(3, 12)
    with nothing_stays(), recorded(monkeypatch), monkeypatch.context():
        listener = AuthListener(("127.0.0.1", 0), key, [1])
        relay = Relay(listener.address, fault, at, down, rng)
        peer, group = Peer(key, relay.address, 1), group_at(listener)
        try:
            with pytest.raises(RankFailed, match=r"rank 1 \(node 1\) died") as failed:
                start(group)
                for number in range(10_000):
                    group.submit(full_step(number)).result()
                    time.sleep(0.002)
            took = time.monotonic() - relay.when
            peer.thread.join(SOON)
            said = f"{failed.value} {peer.why}"
            assert re.search(WORDS[fault], said), said
            with pytest.raises(RankFailed):
                group.submit(full_step(1)).result()
        finally:
            group.close()
            relay.close()
            peer.thread.join(SOON)
    return took


@pytest.mark.parametrize("fault", FAULTS)
def test_a_frame_that_is_not_as_it_was_sent_ends_the_group(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "drop":
        monkeypatch.setattr(authenticated_link, "BEAT", 0.05)
    run(fault, 0, monkeypatch)


class Slept:
    """A stream whose reader waits ``times`` times in vain, however long that took, before the last ``size`` bytes."""

    send_now: Callable[[bytes, int], int] | None = None

    def __init__(self, data: bytes, size: int, times: int) -> None:
        self._data, self._size, self._times = data, size, times
        self.waited: list[float] = []

    def receive_into(self, buffer: memoryview, limit: float) -> int:
        if len(self._data) == self._size and len(self.waited) < self._times:
            self.waited.append(limit)
            raise TimeoutError
        buffer[:] = self._data[: len(buffer)]
        self._data = self._data[len(buffer) :]
        return len(buffer)

    def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    def close(self) -> None: ...


def test_a_machine_that_was_suspended_misses_a_beat_and_no_minute() -> None:
    """Both ends were silent, and neither could beat."""
    tags = authenticated_link.tagger(b"k" * 32)
    sender = KeyedLink(Slept(b"", 0, 0), tags, tags)
    beat, message = (
        b"".join(sender._seal(kind, body)) for kind, body in ((authenticated_link.BEAT_STEADY, b""), (0, b"hello"))
    )
    stream = Slept(beat + message, len(message), authenticated_link.MISSED - 1)
    assert KeyedLink(stream, tags, tags).receive() == b"hello"
    assert max(stream.waited) <= BEAT, "each wait is for one beat"
    stream = Slept(beat + message, len(message), authenticated_link.MISSED)
    with pytest.raises(LinkClosed, match="no sign of life for 5 s"):
        KeyedLink(stream, tags, tags).receive()
    assert sum(stream.waited) == authenticated_link.MISSED * BEAT


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_twenty_faults_of_each_kind(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the beats of a server."""
    taken = []
    for seed in range(1, 21):
        with monkeypatch.context() as patch:
            taken.append(run(fault, seed, patch))
    print(f"\n{fault}: 20 of 20; known after {min(taken):.2f} to {max(taken):.2f} s")
    assert max(taken) < SOON
