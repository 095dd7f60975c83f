"""A Ray cluster that asks for a token (``RAY_AUTH_MODE=token``), whose nodes ``ray start`` has started as users do.

What shows no token is refused, engines are placed for what shows it, and no secret is left where others may read it.
Needs Ray (the extra ``ray``); a cluster has some ten processes and 240 MB of shared memory.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fleet.test_live import TEXTS, said
from tests.links import clusters
from tests.links.clusters import ray
from tests.links.test_ray_engines import FLAGS, LED, PLACED, ask, engines, nothing_runs
from tests.traffic.server_process import ROOT, free_port, server

pytestmark = pytest.mark.long

PUBLIC = "93.184.216.34"
UP = 150.0
"""Seconds in which a node must be there."""


@dataclass(frozen=True)
class Guarded:
    """A cluster of a head without a CPU and two nodes with one each.

    Args:
        folder: of its sockets and logs.
        environ: how its nodes were told of the token.
    """

    address: str
    token: str
    folder: Path
    environ: dict[str, str]


def clean() -> dict[str, str]:
    """The environment without anything of a token."""
    return {n: v for n, v in os.environ.items() if not n.startswith("RAY_AUTH") and n != "RAY_ADDRESS"}


def started(environ: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    ports = {name.replace("_", "-"): free_port() for name in clusters.PORTS}
    ports["dashboard-agent-grpc-port"] = ports.pop("metrics-agent-port")
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
         f"--object-store-memory={80 << 20}", *(f"--{name}={port}" for name, port in ports.items()), *words],
        env={**environ, "PYTHONPATH": str(ROOT) + os.pathsep + environ.get("PYTHONPATH", "")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


NODES = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
while sum(n["Alive"] for n in ray.nodes()) < int(sys.argv[2]):
    time.sleep(0.5)
"""


@contextlib.contextmanager
def started_cluster(environ: dict[str, str], folder: Path, host: str = "127.0.0.1", others: int = 2) -> Iterator[str]:
    """The address of a new cluster."""
    port = free_port()
    address = f"{host}:{port}"
    head = (
        "--head", f"--port={port}", f"--node-ip-address={host}", "--num-cpus=0", "--include-dashboard=false",
        f"--temp-dir={folder}",
    )  # fmt: skip
    made: list[subprocess.Popen[bytes]] = []
    try:
        for count in range(1, others + 2):
            words = [f"--address={address}", "--num-cpus=1", f"--node-ip-address={host}"] if made else head
            made.append(clusters.tried(partial(joined, environ, address, count, *words)))
        yield address
    finally:
        clusters.end([psutil.Process(node.pid) for node in reversed(made)])
        for node in made:
            node.wait()


def joined(environ: dict[str, str], address: str, count: int, *words: str) -> subprocess.Popen[bytes]:
    """A new node, once the cluster counts ``count`` of them."""
    node, end = started(environ, *words), time.monotonic() + UP
    asking = [sys.executable, "-c", NODES, address, str(count)]
    while time.monotonic() < end and node.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not subprocess.run(asking, env=environ, timeout=60, capture_output=True).returncode:
                return node
    raise RuntimeError("the node timed out during startup")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    token = secrets.token_hex(32)
    file = tmp_path_factory.mktemp("token") / "ray.token"
    file.write_text(token)
    file.chmod(0o600)
    environ = {**clean(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        started_cluster(environ, Path(folder)) as address,
    ):
        yield Guarded(address, token, Path(folder), environ)


def spellings(secret: bytes) -> list[bytes]:
    """A secret as it may stand in a log: as it is, in hexadecimal, in base64, as Python writes it."""
    return [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret).encode()[2:-1]]


def traces(secret: bytes, folder: Path) -> list[str]:
    """Logs below ``folder`` and command lines of this machine that have a secret."""
    wanted = spellings(secret)
    files = [path for path in folder.rglob("*") if path.is_file()]
    files += Path("/proc").glob("[0-9]*/cmdline")
    found = []
    for path in files:
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            found += [str(path) for one in wanted if one in data]
    return found


def held(secret: str) -> list[str]:
    """Command lines of processes below this one whose environment has a secret."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if secret in Path(f"/proc/{child.pid}/environ").read_text(errors="replace"):
                found.append(" ".join(child.cmdline()))
    return found


@pytest.mark.parametrize("by", ["path", "variable"])
@pytest.mark.parametrize("shape", [PLACED, LED], ids=["two engines", "one engine on two nodes"])
def test_engines_answer_over_a_cluster_with_a_token(
    shape: tuple[str, ...], by: str, guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the token from a file, or from a variable, which no process gets that does not ask Ray."""
    for name in [n for n in os.environ if n.startswith("RAY_AUTH")]:
        monkeypatch.delenv(name)
    texts = TEXTS[:4]
    with server(tmp_path, *FLAGS, seconds=400) as running:
        expected = [said(ask(running, text)) for text in texts]
    shown = dict(guarded.environ) if by == "path" else {**clean(), "RAY_AUTH_TOKEN": guarded.token}
    shown |= {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": guarded.address}
    with server(tmp_path, *FLAGS, *shape, seconds=400, **shown) as running:
        assert len(engines()) == (2 if shape is PLACED else 1) and not running.engine_pids(), "an engine is here"
        assert [said(ask(running, text)) for text in texts] == expected
        os.kill(engines()[0], signal.SIGSEGV)  # Python and Ray report crashes
        end = time.monotonic() + 300
        while ask(running, texts[0]).status_code != 200:
            assert time.monotonic() < end, running.text()[-2000:]
            time.sleep(1.0)
        keepers = held(guarded.token)
        assert len(keepers) == (2 if by == "variable" else 0), keepers  # the server, and who asks Ray for it
        assert not traces(guarded.token.encode(), guarded.folder)
        assert guarded.token not in running.text() and "Traceback" not in running.text()
    nothing_runs()


@pytest.mark.parametrize("flags", [PLACED, LED], ids=["two engines", "one engine on two nodes"])
@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({}, "asks for a token, and this process shows none: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, "asks for another token than this process shows: "),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE=token and there is no token: set RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/no/such"}, "there is no token: set RAY_AUTH_TOKEN"),
    ],
    ids=["nothing", "another token", "no token", "no file"],
)  # fmt: skip
def test_without_the_token_one_line_has_the_remedy(
    shown: dict[str, str], words: str, flags: tuple[str, ...], guarded: Guarded, tmp_path: Path
) -> None:
    said, code, took = refused({**clean(), "HOME": str(tmp_path), "RAY_ADDRESS": guarded.address, **shown}, *flags)
    print(f"\nrefused after {took:.1f} s: {said[-1]}")
    assert code == 2 and words in said[-1], said
    assert not any("Traceback" in line for line in said) and guarded.token not in "".join(said)


def refused(environ: dict[str, str], *flags: str) -> tuple[list[str], int, float]:
    """Lines of a server that does not start, its exit code, and how long it took."""
    begun = time.monotonic()
    command = [sys.executable, "-P", "-m", "trencadis.server", "--port", str(free_port()), *FLAGS, *flags]
    done = subprocess.run(
        command, env={**environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, timeout=300, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout.strip().splitlines(), done.returncode, time.monotonic() - begun


OTHER = """
import os, ray
ray.__version__ = "2.49.0"
from trencadis.core.errors import StartupError
from trencadis.core.executor.ray_access_and_node_placement import connect
try:
    connect(os.environ)
except StartupError as error:
    print(error)
"""


def test_another_version_than_the_clusters_is_refused(guarded: Guarded) -> None:
    environ = {**guarded.environ, "RAY_ADDRESS": guarded.address, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", OTHER], env=environ, capture_output=True, text=True, timeout=300)
    (line,) = done.stdout.strip().splitlines()
    assert line.startswith("this Ray (2.49.0) is not the cluster's: install its version (") and ray.__version__ in line


ALONE = f'ip link set lo up && ip addr add {PUBLIC}/32 dev lo && exec "$@"'
"""In a network of its own, a machine that has a public address."""


def on_a_public_address(folder: str) -> list[Any]:
    """What a server says to a cluster without a token, with and without one to show, and to one with a token."""
    shown, found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}, list[Any]()
    knowing = {**clean(), **shown}
    for environ, servers in ((clean(), [clean(), knowing]), (knowing, [knowing])):
        with started_cluster(environ, Path(tempfile.mkdtemp(dir=folder)), PUBLIC, 0) as address:
            for one in servers:
                lines, code, _ = refused({**one, "RAY_ADDRESS": address}, *PLACED)
                found.append((code, lines[-1]))
    return found


def test_a_public_address_without_a_token_is_refused(tmp_path: Path) -> None:
    """Whatever token the server itself would show."""
    alone = ["unshare", "-rn", "sh", "-c", ALONE, "sh"]
    if (
        not all(map(shutil.which, ("unshare", "ip")))
        or subprocess.run([*alone, "true"], capture_output=True).returncode
    ):
        pytest.skip("this system gives nobody a network of his own")
    code = "import json, sys, tests.links.test_ray_token as t; print(json.dumps(t.on_a_public_address(sys.argv[1])))"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [*alone, sys.executable, "-c", code, folder]
        environ = {**clean(), "PYTHONPATH": str(ROOT)}
        said = subprocess.run(command, env=environ, timeout=500, check=True, stdout=subprocess.PIPE, text=True).stdout
    *without, (code_with, with_token) = json.loads(said.splitlines()[-1])
    assert len(without) == 2
    for exit_code, line in without:
        assert exit_code == 2 and PUBLIC in line and "public address and asks for no token" in line
        assert "start it with RAY_AUTH_MODE=token" in line
    assert code_with == 2 and "2 engines need 1 CPU each" in with_token, "it is let in, and has no room"


GROUP = """
import os, sys, time
from trencadis.core.engine_config import EngineConfig
from trencadis.core.engine.engine_builder import launcher_of
from trencadis.core.executor.multiproc_executor import MultiprocExecutor
from trencadis.core.links.rank_placement import topology
from tests.fakes import ranks
from tests.fakes.ranks import full_step
import logging
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
config = EngineConfig(device="cpu", tensor_parallel_size=2, threads=1, distributed_executor_backend="ray",
                      allow_tp_over_nodes=True)
launcher = launcher_of(config, topology(config, os.environ), os.environ)
group = Multiproc(config, "tests.fakes.ranks:make", launcher)
group.start(lambda place: ranks.make(config, place))
print(launcher._key.hand_over().hex(), flush=True)
for number in range(100_000):
    group.submit(full_step(number)).result()
    time.sleep(0.01)
"""


def test_no_log_no_command_line_and_no_report_of_a_crash_has_the_key_or_the_token(guarded: Guarded) -> None:
    """A rank dies of a signal that is reported, then the engine of the error that this means to it."""
    node = {**guarded.environ, "RAY_ADDRESS": guarded.address, "PYTHONFAULTHANDLER": "1", "TRENCADIS_RAY_NODE": ""}
    node["TRENCADIS_RAY_NODE"] = first_node(guarded)
    node["PYTHONPATH"] = str(ROOT) + os.pathsep + node.get("PYTHONPATH", "")
    with subprocess.Popen(
        [sys.executable, "-c", GROUP], env=node, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        line = engine.stdout.readline().decode().strip()
        assert line, engine.communicate()[1].decode()[-3000:]
        key = bytes.fromhex(line)
        ranks = [
            p for p in psutil.Process().children(recursive=True) if "executor.rank_process" in " ".join(p.cmdline())
        ]
        assert len(ranks) == 1
        while_it_runs = traces(key, guarded.folder), held(guarded.token)
        os.kill(ranks[0].pid, signal.SIGSEGV)
        _, err = engine.communicate(timeout=60)
    assert engine.returncode == 1 and b"rank 1 (" in err and b"died" in err, err.decode()[-3000:]
    assert while_it_runs == ([], [])
    assert not traces(key, guarded.folder) and not traces(guarded.token.encode(), guarded.folder)
    for secret in (key, guarded.token.encode()):
        assert not any(one in err for one in spellings(secret))


def first_node(guarded: Guarded) -> str:
    """The id of a node that has a CPU."""
    code = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "print(next(n['NodeID'] for n in ray.nodes() if n['Resources'].get('CPU')))"
    )
    command = [sys.executable, "-c", code, guarded.address]
    return subprocess.run(command, env=guarded.environ, check=True, capture_output=True, text=True).stdout.split()[-1]
