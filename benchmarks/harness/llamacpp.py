"""llama.cpp beside this engine: its process under another Python, and figures as ``benchmarks.quantised`` has them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness import gguf
from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.reporting import BENCH

SIDE = Path(__file__).with_name("llamacpp_side.py")
FORMS = {"Q8_0": gguf.Q8_0, "Q4_0": gguf.Q4_0}
"""Name -> type of every matrix of its file, the tied table among them."""

MISSING = "unproven"


class PeerMissing(Exception):
    """The other Python cannot run llama.cpp; the text says why."""


class LlamaCpp:
    """One file in a process of its own, which sleeps while others are measured; figures in milliseconds, one a round.

    Args:
        python: one that has llama-cpp-python.
        form: a key of ``FORMS``.
        shape: the checkpoint, whose file is written once and kept in ``.bench/gguf``.
        context: tokens of the longest prompt and its answer.

    Raises:
        PeerMissing: the process ends before it has loaded the file.
    """

    def __init__(self, python: str, form: str, shape: str, threads: int, context: int) -> None:
        path = file_of(shape, form)
        self.bytes, self.figures = path.stat().st_size, dict[str, list[float]]()
        words = [python, str(SIDE), str(path), str(threads), str(context)]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise PeerMissing(f"{python}: {error.strerror}") from None
        said = self._read()
        self.start, self.version = float(said["start"]), str(said["version"])

    def ask(self, **requested: Any) -> dict[str, Any]:
        """One question of ``llamacpp_side``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requested) + "\n")
        self._process.stdin.flush()
        return self._read()

    def round(self, number: int, short: int, long: int, out: int) -> None:
        """A token behind ``short`` tokens, from ``out`` of them, and a prompt of ``long``."""
        found = self.ask(prompt=ids(short, number), out=out)
        self._note("token, 1 request", found["rest"] / (out - 1))
        self._note(f"prompt of {long}", self.ask(prompt=ids(long, number), out=1)["first"])

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _note(self, figure: str, seconds: float) -> None:
        self.figures.setdefault(figure, []).append(1000 * seconds)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._process.communicate()[1].strip().splitlines() or ["it ended"]
            raise PeerMissing(said[-1])
        found: dict[str, Any] = json.loads(line)
        return found


def file_of(shape: str, form: str) -> Path:
    """The GGUF file of a random checkpoint, written where it is missing."""
    path = BENCH / "gguf" / f"{shape}-{form}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        gguf.written(checkpoint(shape), path, FORMS[form])
    return path


def ids(length: int, seed: int, request: int = 0) -> list[int]:
    """A prompt of ordinary ids that every checkpoint has."""
    return [(seed * 97 + request * 31 + j * 7) % 900 + 5 for j in range(length)]
