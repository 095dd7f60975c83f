"""llama.cpp beside this engine: its process under another Python, and figures as ``benchmarks.quantised`` has them."""

from __future__ import annotations

import signal
from pathlib import Path

from benchmarks.harness import gguf
from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.peer_process import PeerProcess
from benchmarks.harness.reporting import BENCH

SIDE = Path(__file__).with_name("llamacpp_side.py")
FORMS = {"Q8_0": gguf.Q8_0, "Q4_0": gguf.Q4_0}
"""Name -> type of every matrix of its file, the tied table among them."""

HINTS = {
    signal.SIGSEGV: "on a CPU with AMX a build with CMAKE_ARGS=-DGGML_AMX_INT8=OFF may run",
    signal.SIGILL: "it was built for another CPU",
}
"""Signal -> what to try if it ends the process."""


class LlamaCpp(PeerProcess):
    """One file in a process of its own; figures in milliseconds, one a round.

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
        self.bytes = path.stat().st_size
        super().__init__([python, str(SIDE), str(path), str(threads), str(context)], HINTS)

    def round(self, number: int, short: int, long: int, out: int) -> None:
        """A token behind ``short`` tokens, from ``out`` of them, and a prompt of ``long``."""
        found = self.ask(prompt=ids(short, number), out=out)
        self.note("token, 1 request", found["rest"] / (out - 1))
        self.note(f"prompt of {long}", self.ask(prompt=ids(long, number), out=1)["first"])


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
