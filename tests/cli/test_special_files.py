"""Files that an operator names: pipes, devices and endless ones are one line, and never a server that hangs."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.engine.workload_trace_writer import RequestTrace
from trencadis.core.errors import MAX_LINE, StartupError
from trencadis.core.links.group_key import GroupKey
from trencadis.core.process.log_setup import apply_config_file
from trencadis.core.shapes import bucket_options, bucket_profile
from trencadis.server.cli import main
from trencadis.server.config import resolve_settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.listener import Certificates
from trencadis.server.tenants.tenant_registry import KeyFileError, read_key_file
from trencadis.server.text.chat_template import read_override


def read_certificates(**files: Path) -> object:
    config = ServerConfig(**{name: str(path) for name, path in files.items()})  # type: ignore[arg-type]
    return Certificates(config)


CERTIFICATE = Path(__file__)
"""Stands for a certificate and a key: that they are regular files is checked before their contents."""
READERS: dict[str, Callable[[Path], object]] = {
    "--config": lambda path: resolve_settings._read_file(str(path), []),
    "--chat-template": lambda path: read_override(str(path)),
    "--log-config-file": lambda path: apply_config_file(str(path)),
    "--group-key-file": lambda path: GroupKey.read(str(path)),
    "--record-trace": lambda path: RequestTrace(str(path)),
    "--bucket-profile": lambda path: bucket_profile.read_profile(str(path), None, 16),  # type: ignore[arg-type]
    "VLLM_BUCKETING_FROM_FILE": lambda path: bucket_options.read_file(str(path), "VLLM_BUCKETING_FROM_FILE"),
    "--ssl-certfile": lambda path: read_certificates(ssl_certfile=path),
    "--ssl-keyfile": lambda path: read_certificates(ssl_certfile=CERTIFICATE, ssl_keyfile=path),
    "--ssl-ca-certs": lambda path: read_certificates(ssl_certfile=CERTIFICATE, ssl_ca_certs=path),
    "config.json": read_json,
}


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Ends a test that waits for a pipe or reads a device without an end."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


MAKERS: dict[str, Callable[[Path], Any]] = {
    "a pipe": make_pipe,
    "a link to a pipe": lambda path: (make_pipe(path.with_name("p")), path.symlink_to("p")),
    "a socket": make_socket,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("flag", READERS)
def test_what_is_no_regular_file_is_one_line(flag: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    MAKERS[kind](path)
    if (flag, kind) == ("--record-trace", "a device without an end"):
        pytest.skip("what is written there is dropped")
    with pytest.raises(StartupError) as caught:
        READERS[flag](path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("flag", ["--config", "--chat-template", "--log-config-file", "config.json"])
def test_a_file_without_a_fair_size_is_one_line(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StartupError, match="MiB"):
        READERS[flag](path)


YAML = [
    "[" * 5000, "a: " + "{a: " * 3000, "- " * 5000, '"\\ud800": 1', "a: \x01", "a: 2001-99-99", "a: !!timestamp x",
    "a: !!bool x", "a: !!int ''", "a: !!int x", "a: !!float x", "a: !!binary é", "a: !!omap [b]", "a: !!set [b]",
    "? [a]\n: b", "<<: 5", "a: *b", "%YAML 9.9\n---\na", "--- a\n--- b", "a: " + "9" * 6000,
]  # fmt: skip


@pytest.mark.parametrize("text", YAML)
def test_a_key_file_that_cannot_be_read_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError) as caught:
        read_key_file(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", YAML)
def test_yaml_that_cannot_be_read_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(StartupError) as caught:
        resolve_settings._read_file(str(path), [])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name", ["port", "model", "lora_modules", "hf_overrides", "nope", "api_key", "served_model_name"]
)
def test_aliases_that_multiply_are_one_line(name: str, tmp_path: Path) -> None:
    """Nine levels of nine aliases each would be 3 GB of text."""
    letters = "abcdefghi"
    bomb = ["&a [x, x, x, x, x, x, x, x, x]"]
    bomb += [f"&{now} [{', '.join([f'*{before}'] * 9)}]" for before, now in pairwise(letters)]
    path = tmp_path / "x.yaml"
    path.write_text(f"{name}:\n" + "".join(f"  - {line}\n" for line in bomb))
    with pytest.raises(StartupError) as caught:
        resolve_settings._read_file(str(path), [])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("flag", ["--config", "--log-config-file", "--group-key-file", "config.json", "--record-trace"])
def test_a_long_name_does_not_hide_the_reason(flag: str, tmp_path: Path) -> None:
    """The line stays short, and its end says what is wrong."""
    with pytest.raises(StartupError) as caught:
        READERS[flag](tmp_path / ("x" * 100_000 + ".yaml"))
    assert len(str(caught.value)) <= MAX_LINE and "File name too long" in str(caught.value)


LIMITS = {
    "files": errno.EMFILE, "files of all": errno.ENFILE, "memory": errno.ENOMEM, "processes": errno.EAGAIN,
    "disk": errno.ENOSPC, "quota": errno.EDQUOT,
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_start_without_resources_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def start() -> int:
        raise OSError(LIMITS[name], os.strerror(LIMITS[name]))

    assert main._run_with_one_line_errors(start) == 2
    assert capsys.readouterr().err == f"trencadis: the system refuses: {os.strerror(LIMITS[name])}\n"


def test_other_errors_of_the_system_are_mistakes_of_ours() -> None:
    def start() -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file descriptor"):
        main._run_with_one_line_errors(start)
