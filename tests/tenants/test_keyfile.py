"""A key file is read as it says, or refused in one line; nothing of a key is in it."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trencadis.core.errors import QueueFull
from trencadis.server.cli import main
from trencadis.server.tenants import tenant_registry
from trencadis.server.tenants.tenant_registry import (
    LOOK_EVERY,
    KeyFileError,
    Tenant,
    TenantAccount,
    TenantRegistry,
    read_key_file,
)

A, B = (hashlib.sha256(key).hexdigest() for key in (b"key-a", b"key-b"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "keys.yaml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def entry(more: str = "", name: str = "ann", digest: str = A) -> str:
    return f"keys:\n- name: {name}\n  sha256: {digest}\n{more}"


def test_every_field_is_read(write: Callable[[str], Path]) -> None:
    text = (
        entry(
            "  weight: 2.5\n  priority: [-3, 4]\n  requests_per_minute: 60\n  tokens_per_minute: 1000000\n"
            "  pixels_per_minute: 1000000\n  concurrency: 7\n  expires: 2030-01-02\n"
        )
        + f"- name: bob\n  sha256: ['{B}']\n  priority: 5\n  expires: 2030-01-02T03:04:05+01:00\n"
    )
    ann, bob = read_key_file(write(text))
    rates = {"requests_per_minute": 60.0, "tokens_per_minute": 1e6, "pixels_per_minute": 1e6}
    assert ann == Tenant("ann", (A,), 2.5, (-3, 4), rates, 7, ann.expires)
    assert ann.expires == pytest.approx(1893628800, abs=1)  # the end of that day, UTC
    assert bob.priorities == (5, 5) and bob.expires == 1893549845 and bob.weight == 1 and not bob.rates


FAULTS = {
    "no mapping": ("[]", "one list, 'keys'"),
    "another root": ("keys: []\nmore: 1\n", "one list, 'keys'"),
    "no entry": ("keys: []\n", "nobody could get in"),
    "no YAML": ("keys: [", "it is no YAML"),
    "a text": ("keys:\n- x\n", "keys[0] must be a mapping"),
    "an unknown field": (entry("  wieght: 3\n"), "ann has the unknown field 'wieght'"),
    "a key in place of its digest": (entry(digest="sk-secret-key"), "ann.sha256 must be a digest"),
    "capitals": (entry(digest=A.upper()), "ann.sha256 must be a digest"),
    "a name twice": (entry(f"- name: ann\n  sha256: {B}\n"), "the name ann occurs twice"),
    "a key twice": (entry(f"- name: bob\n  sha256: {A}\n"), "bob has a key of ann"),
    "a bad name": (entry(name="'a b'"), "keys[0].name must have"),
    "no weight": (entry("  weight: 0\n"), "ann.weight must be a number above 0"),
    "a weight that is none": (entry("  weight: .nan\n"), "ann.weight must be a number above 0"),
    "a truth for a number": (entry("  tokens_per_minute: true\n"), "ann.tokens_per_minute must be a number"),
    "half a request": (entry("  concurrency: 0.5\n"), "ann.concurrency must be a whole number"),
    "priorities the wrong way": (entry("  priority: [4, 1]\n"), "ann.priority must be"),
    "a moment that is none": (entry("  expires: soon\n"), "ann.expires must be a date"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_that_names_it(write: Callable[[str], Path], name: str) -> None:
    text, message = FAULTS[name]
    with pytest.raises(KeyFileError) as caught:
        read_key_file(write(text))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert A not in str(caught.value) and "sk-secret-key" not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(write: Callable[[str], Path], tmp_path: Path) -> None:
    path = write(entry())
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"others may read it \(mode 640\); run chmod 600"):
        read_key_file(path)
    with pytest.raises(KeyFileError, match="No such file"):
        read_key_file(tmp_path / "none.yaml")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    with pytest.raises(KeyFileError, match=r"no regular file|Is a directory"):
        read_key_file(path)


def test_a_running_server_reads_the_file_in_a_thread(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, threads, go = [0.0], [], threading.Event()
    tenants = TenantRegistry(write(entry()), clock=lambda: now[0])
    real = read_key_file

    def read(path: Path) -> tuple[Tenant, ...]:
        threads.append(threading.current_thread())
        go.wait(30)
        return real(path)

    monkeypatch.setattr(tenant_registry, "read_key_file", read)

    async def run() -> None:
        write(entry(digest=B))
        now[0] += LOOK_EVERY
        assert tenants.find([b"key-a"]) is not None, "what was read before counts meanwhile"
        tenants.reload()  # SIGHUP while it is read: read once more at the next look
        go.set()
        while tenants.find([b"key-b"]) is None:
            await asyncio.sleep(0.001)
        now[0] += LOOK_EVERY
        assert tenants.find([b"key-a"]) is None
        assert tenants._reader is not None
        await tenants._reader

    asyncio.run(run())
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_keys_lead_to_their_tenant_until_they_expire(write: Callable[[str], Path]) -> None:
    now = [0.0]
    tenants = TenantRegistry(write(entry("  expires: 1970-01-01T00:01:40\n")), now=lambda: now[0])
    assert tenants.find([b"", b"key-a"]) is tenants.accounts["ann"]
    assert tenants.find([b"key-b"]) is None and tenants.find([b"key-", b"key-aa", A.encode()]) is None
    now[0] = 101.0
    assert tenants.find([b"key-a"]) is None


def test_a_request_costs_two_digests_however_many_keys_it_brings(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compared with each tenant's digests, and a head of a thousand keys costs as one of two."""
    others = "".join(f"- name: t{i}\n  sha256: {'a' * 32}{i:032x}\n" for i in range(300))
    tenants = TenantRegistry(write(entry(others)))
    hashed: list[bytes] = []
    real = hashlib.sha256

    def count(data: bytes = b"") -> Any:
        hashed.append(data)
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", count)
    assert tenants.find([b"wrong", b"key-a"]) is tenants.accounts["ann"] and len(hashed) == 2
    assert tenants.find([b"wrong"] * 1200) is None and len(hashed) == 4
    assert tenants.find([b"wrong"] * 2 + [b"key-a"]) is None, "the third key does not count"
    assert tenants.find([b"", b"key-a"]) is tenants.accounts["ann"]


def test_a_changed_file_is_read_again_and_a_wrong_one_is_not(
    write: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tenants = TenantRegistry(write(entry("  tokens_per_minute: 100\n")), clock=lambda: now[0])
    account = tenants.find([b"key-a"])
    assert account is not None
    account.take("tokens_per_minute", 90)
    write(entry("  tokens_per_minute: 200\n", digest=B))
    assert tenants.find([b"key-b"]) is None  # not looked at yet
    now[0] = LOOK_EVERY
    assert tenants.find([b"key-b"]) is account and tenants.find([b"key-a"]) is None
    assert account.buckets["tokens_per_minute"].left == 110  # what was spent stays spent
    write("keys: 3\n")
    now[0] *= 2
    assert tenants.find([b"key-b"]) is account
    assert "The keys read before stay in force." in caplog.text and B not in caplog.text


def test_rates_refill_evenly_and_tell_when_to_come_again() -> None:
    now = [0.0]
    rates = {"requests_per_minute": 60.0, "tokens_per_minute": 600.0}
    account = TenantAccount(Tenant("ann", (A,), rates=rates, concurrency=3), lambda: now[0])
    account.take("tokens_per_minute", 600)
    with pytest.raises(QueueFull, match="tokens_per_minute") as caught:
        account.take("tokens_per_minute", 100)
    assert caught.value.retry_after == 10
    now[0] = 10.0
    account.take("tokens_per_minute", 100)
    account.spend("tokens_per_minute", 500)  # an answer: known when it is written
    assert dict(account.make_headers())["x-ratelimit-remaining-tokens"] == "0"
    now[0] = 61.0
    account.take("tokens_per_minute", 1)
    account.enter(2)
    with pytest.raises(QueueFull, match="concurrency"):
        account.enter(2)
    account.leave(2)
    account.enter(3)
    assert account.rejected == {"tokens_per_minute": 1, "concurrency": 1}
    assert account.used["tokens_per_minute"] == 600 + 100 + 500 + 1


def test_a_want_above_the_whole_bucket_takes_a_full_one() -> None:
    now = [0.0]
    account = TenantAccount(Tenant("ann", (A,), rates={"tokens_per_minute": 100.0}), lambda: now[0])
    account.take("tokens_per_minute", 250)  # else it could never be served
    now[0] = 149.0
    with pytest.raises(QueueFull):
        account.take("tokens_per_minute", 100)
    now[0] = 150.0
    account.take("tokens_per_minute", 100)
    assert not math.isnan(account.buckets["tokens_per_minute"].left)


def test_a_new_key_and_its_entry_fit(capsys: pytest.CaptureFixture[str], write: Callable[[str], Path]) -> None:
    assert main.main(["key", "new", "ann"]) == 0
    said = capsys.readouterr().out
    key = said.splitlines()[0].removeprefix("key:").strip()
    assert len(key) > 40
    tenants = TenantRegistry(write("keys:\n" + said.partition("600):\n\n")[2]))
    assert tenants.find([key.encode()]) is tenants.accounts["ann"]
    assert main.main(["key", "new", "a b"]) == 2
