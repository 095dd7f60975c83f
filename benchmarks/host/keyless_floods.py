"""Floods without a key: how long /health and a chat's first token take while 64 connections send what is refused,
and while one client with a key asks for the largest answers, or for templates that never end.

python -m benchmarks.host.keyless_floods [--kinds one-byte,keys] [--seconds 8] [--rate 10] [--connections 64]
    [--model assets/demo]

Each kind runs with an idle engine and with four chats that stream. ``plain`` sends whole requests without a key at the
same rate of connections and a hundredth of the bytes; ``none`` sends nothing. ``choices``, ``prompts``, ``echo`` and
``template`` are single requests with a key, one after another; ``plain-choices`` and ``plain-prompts`` are the same
without log-probabilities. The flood is a process of its own, which shares the CPUs with the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from benchmarks.harness.reporting import ROOT, report, table
from benchmarks.harness.server import Server, serving

HEADER = ("kind", "engine", "health p50 ms", "p99", "most", "first token ms p50", "p90", "statuses")
PIECE = 16 << 10
KEY = "bench-key"
TENANTS = 300


def _post(head: bytes, body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n" + body


def one_byte_chunks() -> bytes:
    """A megabyte of body in chunks of one byte."""
    chunked = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    return _post(chunked, b"1\r\n \r\n" * 150_000 + b"0\r\n\r\n")


def many_keys() -> bytes:
    """1,200 keys in one head."""
    keys = b"".join(b"x-api-key: %032d\r\n" % i for i in range(1200))
    return b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + keys + b"\r\n"


def many_parameters() -> bytes:
    """10,000 query parameters."""
    query = b"&".join(b"a%d=1" % i for i in range(10_000))
    return b"GET /health?" + query + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def many_fields() -> bytes:
    """12,000 header fields."""
    return b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"a%d:1\r\n" % i for i in range(12_000)) + b"\r\n"


def many_trailers() -> bytes:
    """10,000 trailers after a short body."""
    trailers = b"".join(b"a%d: 1\r\n" % i for i in range(10_000))
    return _post(b"Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n")


def folded_lines() -> bytes:
    """A header field of 20,000 folded lines."""
    return b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\na: 1\r\n" + b" b\r\n" * 20_000 + b"\r\n"


def plain() -> bytes:
    """A request as clients send it, without a key."""
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    return _post(b"Content-Length: %d\r\nConnection: close\r\n" % len(body), body)


def tiny_chunks() -> bytes:
    """A megabyte of body in chunks of 64 bytes, the shortest that are taken."""
    chunked = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    return _post(chunked, (b"40\r\n" + b" " * 64 + b"\r\n") * 15_000 + b"0\r\n\r\n")


def pipelined() -> bytes:
    """20,000 probes on one connection."""
    return b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20_000


TEXT = "word " * 700
FAN_OUT = "{% macro a0() %}x{% endmacro %}" + "".join(
    "{% macro a" + str(i) + "() %}" + ("{{ a" + str(i - 1) + "() }}") * 10 + "{% endmacro %}" for i in range(1, 12)
)
USER = [{"role": "user", "content": "Hi"}]
KEYED: dict[str, tuple[str, dict[str, object]]] = {
    "plain-choices": ("/v1/chat/completions", {
        "messages": USER, "n": 60, "max_tokens": 500, "ignore_eos": True, "temperature": 1.0}),
    "plain-prompts": ("/v1/completions", {"prompt": [TEXT] * 40, "max_tokens": 1}),
    "choices": ("/v1/chat/completions", {
        "messages": USER, "n": 60, "max_tokens": 500, "logprobs": True, "top_logprobs": 20, "ignore_eos": True,
        "temperature": 1.0}),
    "prompts": ("/v1/completions", {"prompt": [TEXT] * 40, "prompt_logprobs": 20, "max_tokens": 1}),
    "echo": ("/v1/completions", {"prompt": [TEXT] * 40, "echo": True, "logprobs": 20, "max_tokens": 1}),
    "template": ("/v1/chat/completions", {"messages": USER, "max_tokens": 1, "chat_template": FAN_OUT + "{{ a11() }}"}),
}  # fmt: skip


def ask_again(port: int, kind: str, stop: float) -> None:
    """Sends one request of ``KEYED`` after another until ``stop``, and reads the answers."""
    path, body = KEYED[kind]
    while time.monotonic() < stop:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        while answer.read(1 << 20):
            pass
        connection.close()


KINDS: dict[str, Callable[[], bytes]] = {
    "none": bytes, "plain": plain, "one-byte": one_byte_chunks, "keys": many_keys, "parameters": many_parameters,
    "fields": many_fields, "trailers": many_trailers, "folded": folded_lines,
    "64-byte": tiny_chunks, "pipelined": pipelined,
}  # fmt: skip


def flood(port: int, kind: str, connections: int, rate: float, stop: float) -> None:
    """Sends ``rate`` bytes a second over ``connections`` until the time ``stop``; what is closed is opened again."""
    data, sent, begun = KINDS[kind](), 0, time.monotonic()
    if kind == "plain":
        rate /= 100
    chosen = selectors.DefaultSelector()

    def connect() -> None:
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex(("127.0.0.1", port))
        chosen.register(made, selectors.EVENT_WRITE | selectors.EVENT_READ, [0])

    for _ in range(connections):
        connect()
    while time.monotonic() < stop:
        allowed = (time.monotonic() - begun) * rate - sent
        if allowed <= 0:
            time.sleep(0.002)
            continue
        for key, events in chosen.select(0.05):
            made, at = key.fileobj, key.data
            assert isinstance(made, socket.socket)
            try:
                if events & selectors.EVENT_READ and not made.recv(1 << 16):
                    raise OSError
                if events & selectors.EVENT_WRITE and at[0] < len(data) and allowed > 0:
                    count = made.send(data[at[0] : at[0] + PIECE])
                    at[0], sent, allowed = at[0] + count, sent + count, allowed - count
            except BlockingIOError:
                pass
            except OSError:
                chosen.unregister(made)
                made.close()
                connect()


@contextmanager
def _flooding(server: Server, kind: str, args: argparse.Namespace) -> Iterator[None]:
    if kind == "none":
        yield
        return
    stop = time.monotonic() + args.seconds + 3
    given = (ask_again, (server.port, kind, stop)) if kind in KEYED else (
        flood, (server.port, kind, args.connections, args.rate * 1e6, stop))  # fmt: skip
    made = multiprocessing.get_context("spawn").Process(target=given[0], args=given[1])
    made.start()
    time.sleep(2)  # it has imported and connected
    try:
        yield
    finally:
        made.terminate()
        made.join()


def _chat(port: int, tokens: int, said: list[float] | None = None) -> None:
    """One streamed chat; appends the seconds to its first token."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    )
    begun = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    answer.readline()
    answer.readline()
    answer.readline()
    if said is not None:
        said.append(time.monotonic() - begun)
    answer.read()
    connection.close()


def measure(server: Server, kind: str, busy: bool, args: argparse.Namespace) -> tuple[object, ...]:
    """One row: the latencies of both routes while the flood runs."""
    health, first, ends = list[float](), list[float](), threading.Event()

    def stream() -> None:
        while not ends.is_set():
            _chat(server.port, 200)

    streams = [threading.Thread(target=stream, daemon=True) for _ in range(4 if busy else 0)]
    for one in streams:
        one.start()

    def chat() -> None:
        while not ends.is_set():
            _chat(server.port, 2, first)
            time.sleep(0.1)

    statuses = set[int]()
    with _flooding(server, kind, args):
        asker = threading.Thread(target=chat)
        asker.start()
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            begun = time.monotonic()
            probe = http.client.HTTPConnection(urlsplit(server.url).hostname or "", server.port, timeout=60)
            probe.request("GET", "/health")
            statuses.add(probe.getresponse().status)
            probe.close()
            health.append(time.monotonic() - begun)
            time.sleep(0.02)
        ends.set()
        asker.join()
    for one in streams:
        one.join()
    cuts, firsts = statistics.quantiles(health, n=100), sorted(first)
    ms = [1000 * v for v in (cuts[49], cuts[98], max(health), firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.9)])]
    return kind, "busy" if busy else "idle", *(f"{v:.0f}" for v in ms), str(sorted(statuses))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join([*KINDS, *KEYED]))
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rate", type=float, default=10, help="megabytes a second of all connections together")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        names = {KEY: "bench"} | {f"other-{i}": f"tenant{i}" for i in range(TENANTS)}
        tenants = [{"name": name, "sha256": sha256(key.encode()).hexdigest()} for key, name in names.items()]
        keys.write_text(yaml.safe_dump({"keys": tenants}))
        keys.chmod(0o600)
        flags = ["--model", args.model, "--threads", "1", "--api-key-file", str(keys), "--scheduling-policy", "fair"]
        flags.append("--trust-request-chat-template")
        rows = []
        with serving(*flags) as server:
            for kind in args.kinds.split(","):
                rows += [measure(server, kind, busy, args) for busy in (False, True)]
                print(rows[-2], rows[-1], flush=True)
    report("keyless_floods", {"rows": rows}, table(HEADER, rows))


if __name__ == "__main__":
    main()
