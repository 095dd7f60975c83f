"""OpenVINO GenAI beside this engine: a process under another Python, in process there, without HTTP."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.harness.checkpoints import checkpoint
from benchmarks.harness.peer_process import PeerMissing, PeerProcess, describe_end
from benchmarks.harness.reporting import BENCH

SIDE = Path(__file__).with_name("openvino_side.py")

FORMS = {"16 bits": "fp16", "int8": "int8", "int4": "int4"}
"""Name -> ``--weight-format`` of ``optimum-cli export openvino``."""

NEEDS = "it needs a venv with openvino-genai, optimum-intel and transformers 5.0.0"

REQUESTS, SIDE_OF_IMAGE = (1, 8, 32), 448


class OpenVino(PeerProcess):
    """One exported model in a process of its own; figures in milliseconds, one a round.

    Args:
        python: one that has openvino-genai and optimum-intel.
        form: a key of ``FORMS``.
        shape: the checkpoint, whose export is made once and kept in ``.bench/openvino``.

    Raises:
        PeerMissing: the model cannot be exported or loaded.
    """

    def __init__(self, python: str, form: str, shape: str, threads: int) -> None:
        path = export(python, shape, form)
        self.bytes = sum(file.stat().st_size for file in path.glob("*.bin"))
        super().__init__([python, str(SIDE), str(path), str(threads)])

    def round(self, number: int, short: int, long: int, out: int) -> None:
        """Tokens of 1, 8 and 32 requests behind about ``short`` tokens, a prompt of about ``long``, and an image.

        Texts have a word a token, since their ids cannot be given.
        """
        for count in REQUESTS:
            prompts = [words(short, number * count + i) for i in range(count)]
            whole, first = (self.ask(prompts=prompts, out=n)["seconds"] for n in (out, 1))
            self.note(f"token, {count} request{'s' if count > 1 else ''}", (whole - first) / (out - 1))
        self.note(f"prompt of {long}", self.ask(prompts=[words(long, number)], out=1)["seconds"])
        image = self.ask(image=SIDE_OF_IMAGE, prompt=words(12, number), out=1, seed=number)
        self.note("first token of an image", image["seconds"])


def words(count: int, seed: int) -> str:
    """A text of ``count`` short words."""
    return " ".join("abcdefghij"[(seed * 7 + i * 3) % 10] for i in range(count))


def export(python: str, shape: str, form: str) -> Path:
    """Exports a random checkpoint, once, and returns its folder.

    Raises:
        PeerMissing: the other Python cannot.
    """
    path = BENCH / "openvino" / f"{shape}-{FORMS[form]}"
    if (path / "config.json").is_file():
        return path
    tool = Path(python).with_name("optimum-cli")
    line = [str(tool), "export", "openvino", "--model", str(checkpoint(shape))]
    line += ["--task", "image-text-to-text", "--weight-format", FORMS[form], str(path)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    except OSError as error:
        raise PeerMissing(f"{tool}: {error.strerror}; {NEEDS}") from None
    if done.returncode:
        shutil.rmtree(path, ignore_errors=True)
        said = done.stderr.strip().splitlines() or [""]
        raise PeerMissing(f"the export: {describe_end(done.returncode, said[-1][:300], {})}")
    return path
