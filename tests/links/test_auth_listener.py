"""Who comes in over TCP: a rank that knows the group's key, and nobody else; nothing shows the key."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.ranks import full_step
from tests.links.peers import Peer, group_at, nothing_stays, recorded, start
from tests.operations.test_tls import certificate, needs_openssl
from trencadis.core.errors import StartupError
from trencadis.core.executor import headless_ranks, rank_messages
from trencadis.core.executor.rank_info_and_fingerprint import (
    RankFingerprint,
    checkpoint_digest,
    compute_rank_fingerprint,
    describe_differences,
)
from trencadis.core.links import rank_listener
from trencadis.core.links.group_key import GroupKey, TlsFiles
from trencadis.core.links.handshake import CLAIM, MARK, NONCE, NUMBER, PROOF, HandshakeFailed, handshake_as_rank
from trencadis.core.links.rank_listener import AuthListener
from trencadis.core.links.tcp_and_tls_stream import PlainStream, TlsStream

Attack = Callable[[socket.socket, random.Random], None]


def _reflected(sock: socket.socket, rng: random.Random) -> None:
    """The engine's own challenge and mark, as if they proved anything."""
    greeting = _all(sock, len(MARK) + NONCE)
    sock.sendall((greeting + NUMBER.pack(1) + greeting)[:CLAIM].ljust(CLAIM, b"\0"))


def _all(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data)) or pytest.fail("closed")
    return data


ATTACKS: dict[str, Attack] = {
    "noise": lambda s, rng: s.sendall(rng.randbytes(1 << 16)),
    "4 GiB announced": lambda s, rng: s.sendall(b"\xff" * 4 + rng.randbytes(28)),
    "a frame before the proof": lambda s, rng: s.sendall(
        rank_messages.encode(rank_messages.RankReady()).ljust(CLAIM, b"\0")
    ),
    "another key": lambda s, rng: s.sendall(MARK + rng.randbytes(NONCE) + NUMBER.pack(1) + rng.randbytes(PROOF)),
    "reflection": _reflected,
    "HTTP": lambda s, rng: s.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"a" * 100),
    "silence": lambda s, rng: None,
    "half a claim": lambda s, rng: s.sendall(MARK + rng.randbytes(NONCE)),
    "gone at once": lambda s, rng: s.close(),
}


def attacked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attackers at once; then the rank comes, and Steps run."""
    key, rng, socks = GroupKey.generate(), random.Random(seed), []
    with nothing_stays(), recorded(monkeypatch):
        auth_listener = AuthListener(("127.0.0.1", 0), key, [1])
        group = group_at(auth_listener)
        for attack in rng.sample(sorted(ATTACKS), len(ATTACKS)):
            socks.append(socket.create_connection(auth_listener.address))
            ATTACKS[attack](socks[-1], rng)
        peer = Peer(key, auth_listener.address, 1)
        try:
            start(group)
            assert [group.submit(full_step(n)).result().number for n in range(5)] == list(range(5))
        finally:
            group.close()
            peer.thread.join(5)
            for sock in socks:
                sock.close()
        assert peer.said_goodbye and len(peer.steps) == 5


def test_attackers_stay_outside_and_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked(0, monkeypatch)


@pytest.mark.long
def test_twenty_rounds_of_attackers(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1, 21):
        with monkeypatch.context() as patch:
            attacked(seed, patch)


def test_a_claim_that_was_overheard_is_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    """It answers another challenge."""
    key = GroupKey.generate()
    with nothing_stays():
        auth_listener = AuthListener(("127.0.0.1", 0), key, [1, 2])
        listener = socket.create_server(("127.0.0.1", 0))
        said: list[bytes] = []

        def between() -> None:
            rank, _ = listener.accept()
            with rank, socket.create_connection(auth_listener.address) as engine:
                rank.sendall(_all(engine, len(MARK) + NONCE))
                said.append(_all(rank, CLAIM))

        thread = threading.Thread(target=between)
        thread.start()
        with pytest.raises((HandshakeFailed, OSError)), socket.create_connection(listener.getsockname()) as sock:
            handshake_as_rank(PlainStream(sock), key, 1)
        thread.join()
        with socket.create_connection(auth_listener.address) as again:
            _all(again, len(MARK) + NONCE)
            again.sendall(said[0])
            again.settimeout(5)
            assert again.recv(1) == b""
        assert auth_listener.missing() == [1, 2] and "its key is another one" in caplog.text
        auth_listener.close()
        listener.close()


def test_a_rank_with_another_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless_ranks, "RETRY_SECONDS", 0.01)
    auth_listener = AuthListener(("127.0.0.1", 0), GroupKey.generate(), [1])
    peer = Peer(GroupKey.generate(), auth_listener.address, 1)
    peer.thread.join(5)
    assert "its key may be another one" in peer.why and auth_listener.missing() == [1]
    auth_listener.close()


def test_an_engine_with_another_key_gets_nothing_of_a_rank() -> None:
    """Whoever listens there learns a proof for one challenge, and no message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(MARK + os.urandom(NONCE))
                _all(sock, CLAIM)
                sock.sendall(os.urandom(PROOF))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(HandshakeFailed, match="another"), socket.create_connection(listener.getsockname()) as sock:
            handshake_as_rank(PlainStream(sock), GroupKey.generate(), 1)
        thread.join()


def test_a_number_comes_in_once_and_only_if_it_is_expected(caplog: pytest.LogCaptureFixture) -> None:
    key = GroupKey.generate()
    auth_listener = AuthListener(("127.0.0.1", 0), key, [1, 2])
    for number in (1, 1, 7):
        with socket.create_connection(auth_listener.address) as sock:
            handshake_as_rank(PlainStream(sock), key, number)
            end = time.monotonic() + 5
            while number == 1 and 1 in auth_listener.missing():
                assert time.monotonic() < end
                time.sleep(0.01)
    end = time.monotonic() + 5
    while caplog.text.count("is not expected") < 2:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)
    assert auth_listener.missing() == [2]
    auth_listener.close()


def test_many_who_prove_nothing_are_bounded() -> None:
    with nothing_stays():
        auth_listener = AuthListener(("127.0.0.1", 0), GroupKey.generate(), [1])
        before = threading.active_count()
        socks = [socket.create_connection(auth_listener.address) for _ in range(rank_listener.WAITING + 20)]
        end = time.monotonic() + 5
        while sum(_closed(s) for s in socks) < 20:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert all(_closed(s) for s in socks[:20]), "the oldest ones were closed"
        while threading.active_count() - before > rank_listener.WAITING:
            assert time.monotonic() < end
            time.sleep(0.02)
        auth_listener.close()
        for sock in socks:
            sock.close()


def test_idle_connections_keep_no_rank_out() -> None:
    key = GroupKey.generate()
    auth_listener = AuthListener(("127.0.0.1", 0), key, [1])
    socks = [socket.create_connection(auth_listener.address) for _ in range(2 * rank_listener.WAITING)]
    with socket.create_connection(auth_listener.address) as sock:
        handshake_as_rank(PlainStream(sock), key, 1)
        auth_listener.links[1].result(5).close()
    auth_listener.close()
    for one in socks:
        one.close()


def _closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while data := sock.recv(1024):
            assert data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(StartupError, match=r"--master-addr 192\.0\.2\.1 --master-port 5: .*address of this machine"):
        AuthListener(("192.0.2.1", 5), GroupKey.generate(), [1])


def test_nothing_shows_the_key(tmp_path: Path) -> None:
    held = os.urandom(32)
    key = GroupKey(held)
    reported = rank_messages.ConnectInfo("a", 1, 1, 1, 2, key=held)
    for shown in (repr(key), str(key), f"{key}", repr(reported), str(reported), repr([reported])):
        assert held.hex() not in shown and repr(held)[2:-1] not in shown
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(key)
    auth_listener = AuthListener(("127.0.0.1", 0), key, [1])
    with pytest.raises((HandshakeFailed, OSError)) as failed, socket.create_connection(auth_listener.address) as sock:
        stream = PlainStream(sock)
        stream.receive_into = lambda *a: (_ for _ in ()).throw(HandshakeFailed("broken here"))  # type: ignore[method-assign]
        handshake_as_rank(stream, key, 1)
    ours = failed.value.__traceback__
    assert ours is not None  # this frame's own variables have it
    found = traceback.TracebackException(type(failed.value), failed.value, ours.tb_next, capture_locals=True)
    report = "".join(found.format())
    assert "GroupKey(***)" in report and held.hex() not in report and repr(held)[2:-1] not in report
    auth_listener.close()


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "group.key"
    with pytest.raises(StartupError, match="No such file"):
        GroupKey.read(str(file))
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(StartupError, match="5 bytes, and 32 are needed"):
        GroupKey.read(str(file))
    file.write_text("x" * 44 + "\n")
    assert GroupKey.read(str(file)).proof(b"a") == GroupKey.read(str(file)).proof(b"a")
    for mode in (0o604, 0o640, 0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(StartupError, match=rf"others may read it \(mode {mode:o}\); run chmod 600"):
            GroupKey.read(str(file))


def test_other_versions_and_other_checkpoints_are_refused_before_loading(tmp_path: Path) -> None:
    ours = compute_rank_fingerprint("")
    other = RankFingerprint("9.9", ours.python, ours.torch, ours.checkpoint)
    assert describe_differences(ours, ours) == "" and "Trencadis 9.9" in describe_differences(ours, other)
    key = GroupKey.generate()
    with nothing_stays():
        auth_listener = AuthListener(("127.0.0.1", 0), key, [1])
        peer, group = Peer(key, auth_listener.address, 1, facts=other), group_at(auth_listener)
        begun = time.monotonic()
        with pytest.raises(
            StartupError, match=r"^rank 1 \(node 1\) does not belong to this engine: it has Trencadis 9\.9"
        ):
            group.start(lambda place: pytest.fail("rank 0 has begun to load"))
        assert time.monotonic() - begun < 5
        peer.thread.join(5)


def test_a_checkpoint_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(5 << 20))
    found = checkpoint_digest(str(tmp_path))
    assert checkpoint_digest(str(tmp_path)) == found
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek((5 << 20) // 2)
        file.write(b"other weights")
    assert checkpoint_digest(str(tmp_path)) != found
    with pytest.raises(StartupError, match=r"no folder .*share HF_HOME"):
        checkpoint_digest(str(tmp_path / "absent"))


@needs_openssl
def test_tls_needs_the_groups_own_authority(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = {}
    for name in ("ours", "theirs"):
        authority, _ = certificate(tmp_path, f"{name}-ca")
        cert, secret = certificate(tmp_path, name, f"{name}-ca")
        made[name] = TlsFiles(cert, secret, authority)
    key = GroupKey.generate()
    with nothing_stays():
        auth_listener = AuthListener(("127.0.0.1", 0), key, [1], made["ours"].context(server=True))
        with pytest.raises(OSError), socket.create_connection(auth_listener.address) as sock:
            handshake_as_rank(TlsStream(sock, made["theirs"].context(server=False), False, 5.0), key, 1)  # type: ignore[arg-type]
        assert auth_listener.missing() == [1]
        peer, group = Peer(key, auth_listener.address, 1, tls=made["ours"]), group_at(auth_listener)
        start(group)
        assert [group.submit(full_step(n)).result().number for n in range(20)] == list(range(20))
        group.close()
        peer.thread.join(5)
        assert peer.said_goodbye
    with pytest.raises(StartupError, match="belong together"):
        TlsFiles("a", "", "").context(server=True)
    with pytest.raises(StartupError, match="No such file"):
        TlsFiles("a", "b", "c").context(server=True)
