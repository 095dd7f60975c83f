"""Counts the code that one answer takes: lines of our functions that run, and the stays of the runner's step.

    python tools/request_path.py [--list] [--bars]

Starts the server with the bundled demo on the CPU and traces the API process, the engine process and the decode
workers. One text and one image are answered first, so that nothing counts that runs once; then come a text and an
image that are new, 16 greedy tokens each, and what ran between a request and its answer counts:

* **lines**: those of the functions that ran, a function whole whatever part of it ran, without docstrings, comments and
  empty lines. A function inside another one counts for itself. Code of libraries does not count, nor code that
  dataclasses make, nor what a timer starts (``TIMED``) and by chance falls into that time.
* **stays**: the rooms in which a function ran between the beginning and the end of ``ModelRunner.execute``. A room is a
  package; a file beside a top folder's packages is a room of its own. A step comes to a room as often as it likes: it
  stays there once.

``--list`` prints the lines by file and function, and the rooms; ``--bars`` ends with 1 where a figure is above its bar.
"""

from __future__ import annotations

import argparse
import ast
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tokenize
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("core", "backends", "multimodal", "server", "trencadis")
BARS = {"text": 2600, "image": 3900, "stays": 12}
TIMED = {
    "server/engine/engine_process_link.py": ("EngineLink.watch", "EngineLink.check_step"),
    "core/process/engine_process.py": ("EngineProcess.pong",),
    "core/process/heap_trimmer.py": ("run_trimmer", "run_collector", "HeapTrimmer.collect_and_trim"),
    "server/http/fastapi_app.py": ("_log_stats",),
    "server/http/uvicorn_server.py": ("WebServer.serve",),
    "server/processes/server_lifecycle.py": ("ServerLifecycle.run", "SingleProcessServer.serve"),
}
"""Functions that timers start, by file: pings and their answers, garbage, the line of counters, uvicorn's ticks."""

TRACER = '''
"""Tells the counting process which functions ran; every Python that has this folder on its path imports it."""

import json, os, socket, sys, threading

ran, stepped, steps = {}, {}, threading.local()
timed = frozenset(json.loads(os.environ["TIMED"]))


def hook(frame, event, argument):
    code = frame.f_code
    if code.co_qualname in timed and event in ("call", "return"):
        steps.timed = getattr(steps, "timed", 0) + (1 if event == "call" else -1)
    elif event == "call":
        if getattr(steps, "timed", 0):
            return
        ran[id(code)] = code
        if code.co_qualname == "ModelRunner.execute":
            steps.inside = True
        if getattr(steps, "inside", False):
            stepped[id(code)] = code
    elif event == "return" and code.co_qualname == "ModelRunner.execute":
        steps.inside = False


def serve(link):
    for line in link.makefile("r"):
        if line == "clear\\n":
            ran.clear()
            stepped.clear()
        found = [[[c.co_filename, c.co_firstlineno, c.co_name] for c in list(d.values())] for d in (ran, stepped)]
        link.sendall(json.dumps(found).encode() + b"\\n")


link = socket.socket(socket.AF_UNIX)
try:
    link.connect(os.path.join(os.path.dirname(__file__), "socket"))
except OSError:
    pass
else:
    threading.Thread(target=serve, args=[link], daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)
'''


class Called(NamedTuple):
    """A function by where its code begins."""

    file: str
    line: int
    name: str


class Ran(NamedTuple):
    """Functions of ours that ran for one answer, and those that ran inside ``ModelRunner.execute``."""

    all: frozenset[Called]
    step: frozenset[Called]


class Tracers:
    """The connections of all traced processes."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(TRACER, encoding="utf-8")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "socket"))
        self._door.listen(64)
        self._links: list[tuple[socket.socket, Any]] = []

    def ask(self, what: str) -> Ran:
        """``clear`` forgets, anything else only asks; what ran in all processes, ended ones left out."""
        self._accept()
        found: tuple[set[Called], set[Called]] = set(), set()
        for link, file in self._links:
            try:
                link.sendall(what.encode() + b"\n")
                answer = json.loads(file.readline() or "[[], []]")
            except OSError:
                continue
            for names, part in zip(found, answer, strict=True):
                names.update(Called(*entry) for entry in part)
        return Ran(*(frozenset(c._replace(file=_own(c.file)) for c in part if _own(c.file)) for part in found))

    def _accept(self) -> None:
        self._door.settimeout(0.05)
        while True:
            try:
                link, _ = self._door.accept()
            except TimeoutError:
                return
            link.settimeout(60)
            self._links.append((link, link.makefile("r")))


@cache
def _own(file: str) -> str:
    """A file of ours relative to the repository, "" for others."""
    path = Path(file).resolve()
    if not path.is_relative_to(ROOT):
        return ""
    inside = path.relative_to(ROOT)
    return str(inside) if inside.parts[0] in TOPS else ""


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A traced server with the demo; yields its URL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "HF_HUB_OFFLINE": "1"}
    env["TIMED"] = json.dumps([name for names in TIMED.values() for name in names])
    flags = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "trencadis.server", *flags]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            if process.poll() is not None:
                raise SystemExit((folder / "log").read_text(errors="replace"))
            try:
                urllib.request.urlopen(url + "/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(url: str, text: str, image: bytes = b"") -> None:
    """One chat completion of 16 greedy tokens."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image:
        data = "data:image/png;base64," + base64.b64encode(image).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": data}})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 16


def answers() -> dict[str, Ran]:
    """What ran for one text answer and for one image answer."""
    from PIL import Image, ImageOps

    image = Image.open(ROOT / "assets" / "demo_picture.png").convert("RGB")
    flipped = io.BytesIO()
    ImageOps.flip(image).save(flipped, "PNG")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tracers = Tracers(folder)
        with server(folder) as url:
            ask(url, "What can you do?")
            ask(url, "What is in the picture?", (ROOT / "assets" / "demo_picture.png").read_bytes())
            found = {}
            for kind, text, data in (("text", "Name a colour.", b""), ("image", "And in this?", flipped.getvalue())):
                time.sleep(2)  # what a quiet second starts has run
                tracers.ask("clear")
                ask(url, text, data)
                found[kind] = tracers.ask("dump")
    return found


@cache
def functions(file: str) -> dict[tuple[int, str], frozenset[int]]:
    """The code lines of each function of a file, by its first line (a decorator's, if any) and name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    code: set[int] = set()
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: dict[tuple[int, str], frozenset[int]] = {}

    def visit(node: ast.AST) -> set[int]:
        """Lines of the functions inside ``node``."""
        inner: set[int] = set()
        for child in ast.iter_child_nodes(node):
            inner |= visit(child)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return inner
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        lines = set(range(first, (node.end_lineno or first) + 1)) & code
        found[first, getattr(node, "name", "<lambda>")] = frozenset(lines - (inner - {first}))
        return lines

    visit(tree)
    return found


def lines(ran: frozenset[Called]) -> dict[str, int]:
    """Lines that count, by file."""
    found: dict[str, set[int]] = {}
    for called in ran:
        found.setdefault(called.file, set()).update(functions(called.file).get((called.line, called.name), frozenset()))
    return {file: len(numbers) for file, numbers in sorted(found.items()) if numbers}


def by_function(ran: frozenset[Called], file: str) -> str:
    """``name lines`` of the functions of a file that ran, the longest first."""
    found = functions(file)
    sizes = [(len(found[c.line, c.name]), c.name) for c in ran if c.file == file and (c.line, c.name) in found]
    return ", ".join(f"{name} {count}" for count, name in sorted(sizes, reverse=True))


def room(file: str) -> str:
    """The package of a file, or the file where it lies beside a top folder's packages."""
    folder = str(Path(file).parent)
    return file if folder in TOPS else folder


def main() -> int:
    """Prints the figures; 1 with ``--bars`` where one is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="lines by file and function, and the rooms")
    parser.add_argument("--bars", action="store_true", help="end with 1 where a figure is above its bar")
    args = parser.parse_args()
    figures = {}
    for kind, ran in answers().items():
        by_file, rooms = lines(ran.all), sorted({room(c.file) for c in ran.step})
        count, stays = sum(by_file.values()), len(rooms)
        print(f"{kind}: {count} lines of functions in {len(by_file)} files; the runner's step makes {stays} stays")
        if args.list:
            for file, n in sorted(by_file.items(), key=lambda item: -item[1]):
                print(f"{n:6d} {file}: {by_function(ran.all, file)}")
            print("stays: " + ", ".join(rooms))
        figures[kind], figures["stays"] = count, max(stays, figures.get("stays", 0))
    above = [f"{name} {figures[name]} > {bar}" for name, bar in BARS.items() if figures[name] > bar]
    print("above the bar: " + ", ".join(above) if above else "every figure is within its bar")
    return 1 if above and args.bars else 0


if __name__ == "__main__":
    sys.exit(main())
