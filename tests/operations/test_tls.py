"""TLS over a real socket: certificates read again, those of clients, wrong files; trusted proxies; many headers."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.operations.conftest import JsonLog
from tests.traffic.live_app import live
from trencadis.core.errors import StartupError
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import resolve_settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http import listener, uvicorn_server

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def certificate(folder: Path, name: str, signer: str = "", passphrase: str = "") -> tuple[str, str]:
    """Files of a certificate and its key, both named ``name``; signed by itself or by ``signer``."""
    key, made = folder / f"{name}.key", folder / f"{name}.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    words += ["-keyout", str(key), "-out", str(made), "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    if signer:
        words += ["-CA", str(folder / f"{signer}.pem"), "-CAkey", str(folder / f"{signer}.key")]
    subprocess.run(words, check=True, capture_output=True)
    return str(made), str(key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    for name in ("old", "new", "ca", "other"):
        certificate(made, name)
    certificate(made, "client", "ca")
    certificate(made, "stranger", "other")
    return made


def get(url: str, authority: Path, client: Path | None = None) -> httpx.Response:
    context = ssl.create_default_context(cafile=str(authority))
    if client is not None:
        context.load_cert_chain(client.with_suffix(".pem"), client.with_suffix(".key"))
    return httpx.get(url + "/health", verify=context, trust_env=False, timeout=20)


def put(folder: Path, name: str, where: Path) -> None:
    for end in (".pem", ".key"):
        shutil.copy(folder / (name + end), where.with_suffix(end))


def until(true: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@needs_openssl
def test_certificates_are_read_again_and_a_wrong_one_is_not_used(
    harness: ScriptedApp, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_log: JsonLog
) -> None:
    monkeypatch.setattr(listener.Certificates.watch, "__defaults__", (0.05, None))
    at = tmp_path / "server"
    put(folder, "old", at)
    files = {"ssl_certfile": str(at.with_suffix(".pem")), "ssl_keyfile": str(at.with_suffix(".key"))}
    with live(harness, **files, enable_ssl_refresh=True) as url:
        assert get(url, folder / "old.pem").status_code == 200
        held = httpx.Client(verify=ssl.create_default_context(cafile=str(folder / "old.pem")), trust_env=False)
        assert held.get(url + "/health").status_code == 200
        shutil.copy(folder / "new.pem", at.with_suffix(".pem"))  # the key of another one
        until(lambda: "belongs to another certificate" in "".join(json_log.text))
        assert get(url, folder / "old.pem").status_code == 200
        put(folder, "new", at)
        until(lambda: "read again" in "".join(json_log.text))
        assert get(url, folder / "new.pem").status_code == 200
        with pytest.raises(httpx.ConnectError):
            get(url, folder / "old.pem")
        assert held.get(url + "/health").status_code == 200, "an open connection goes on"
        held.close()


@needs_openssl
def test_without_the_flag_only_a_hangup_reads_them_again(harness: ScriptedApp, folder: Path, tmp_path: Path) -> None:
    at = tmp_path / "server"
    put(folder, "old", at)
    server = ServerConfig(ssl_certfile=str(at.with_suffix(".pem")), ssl_keyfile=str(at.with_suffix(".key")))
    made = uvicorn_server.make_server(server, harness.app(), 1)
    assert made.certificates is not None and made.config.ssl is made.certificates.context
    before = made.certificates.context.current
    put(folder, "new", at)
    assert made.certificates.context.current is before
    made.certificates.reload()
    assert made.certificates.context.current is not before


@needs_openssl
@pytest.mark.parametrize("required", [1, 2])
def test_clients_certificates(harness: ScriptedApp, folder: Path, required: int) -> None:
    files = {"ssl_certfile": str(folder / "old.pem"), "ssl_keyfile": str(folder / "old.key")}
    with live(harness, **files, ssl_ca_certs=str(folder / "ca.pem"), ssl_cert_reqs=required) as url:
        assert get(url, folder / "old.pem", folder / "client").status_code == 200
        with pytest.raises(httpx.TransportError):
            get(url, folder / "old.pem", folder / "stranger")
        if required == 1:
            assert get(url, folder / "old.pem").status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                get(url, folder / "old.pem")


@needs_openssl
def test_wrong_files_are_one_line(folder: Path, tmp_path: Path) -> None:
    locked = certificate(tmp_path, "locked", passphrase="secret")
    old, key = str(folder / "old.pem"), str(folder / "old.key")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for fields, why in (
        ({"ssl_certfile": "/no/such"}, "No such file"),
        ({"ssl_certfile": str(text)}, "no certificate and key in PEM form"),
        ({"ssl_certfile": old}, "no certificate and key in PEM form"),
        ({"ssl_certfile": old, "ssl_keyfile": str(folder / "new.key")}, "belongs to another certificate"),
        ({"ssl_certfile": locked[0], "ssl_keyfile": locked[1]}, "has a passphrase"),
        ({"ssl_certfile": old, "ssl_keyfile": key, "ssl_ca_certs": str(text)}, "--ssl-ca-certs"),
        ({"ssl_certfile": old, "ssl_keyfile": key, "ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        ({"ssl_certfile": old, "ssl_keyfile": key, "ssl_ciphers": "none-such"}, "--ssl-ciphers none-such"),
    ):
        with pytest.raises(StartupError) as found:
            listener.Certificates(ServerConfig(**fields))  # type: ignore[arg-type]
        assert why in str(found.value) and "\n" not in str(found.value)
    with pytest.raises(StartupError, match="needs --ssl-certfile"):
        resolve_settings(command_line_parser.parse(["--ssl-cert-reqs", "2"]), {})


def test_a_change_is_read_once_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificate and key are two files: a look between their replacements reads neither."""
    stamps = iter([[1], [2], [3], [3], [3], [4], [4]])
    made = listener.Certificates.__new__(listener.Certificates)
    made._seen = [1]  # type: ignore[list-item]
    monkeypatch.setattr(made, "_get_mtimes", lambda: next(stamps))
    read: list[Any] = []

    def renew() -> None:
        made._seen = now[-1]
        read.append(now[-1])

    now: list[Any] = []

    async def sleep(_: float) -> None:
        pass

    stamp = made._get_mtimes
    monkeypatch.setattr(made, "_get_mtimes", lambda: now.append(stamp()) or now[-1])
    monkeypatch.setattr("trencadis.server.http.listener.asyncio.sleep", sleep)
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(made.watch(0.0, renew))
    assert read == [[3], [4]]


def test_only_trusted_proxies_name_the_client(harness: ScriptedApp, json_log: JsonLog) -> None:
    sent = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    for trusted, client in ((["127.0.0.0/8"], "203.0.113.9:0"), (["10.0.0.1"], "127.0.0.1:"), (["*"], "203.0.113.9:0")):
        with live(harness, forwarded_allow_ips=trusted, disable_uvicorn_access_log=False) as url:
            assert httpx.get(url + "/health", headers=sent, trust_env=False).status_code == 200
        assert json_log.of("access")[-1]["client"].startswith(client)
    read = resolve_settings(command_line_parser.parse([]), {"FORWARDED_ALLOW_IPS": "10.0.0.1,10.1.0.0/16"}).server
    assert uvicorn_server.make_server(read, harness.app(), 1).config.forwarded_allow_ips == "10.0.0.1,10.1.0.0/16"


def test_more_header_fields_than_the_bound_are_a_431(harness: ScriptedApp) -> None:
    harness.app(h11_max_header_count=8)
    assert harness.call("/health", headers={f"x-{i}": "1" for i in range(3)}).status_code == 200
    reported = harness.call("/health", headers={f"x-{i}": "1" for i in range(20)})
    assert reported.status_code == 431 and reported.json()["error"]["message"].endswith("more than 8 header fields.")
