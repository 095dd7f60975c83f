"""Copies the files of a checkpoint that hold no weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from trencadis.core.quant.writing.safetensors_writer import INDEX

OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
"""Suffixes of files that hold weights in some form and are not copied."""


def copy_other_files(source: Path, out: Path, without: Sequence[str]) -> None:
    """Copies every file and folder of ``source`` that holds no weights, except those ``without``, to ``out``."""
    for entry in sorted(source.iterdir()):
        if entry.name.startswith(".") or entry.name in (*without, INDEX) or _holds_weights(entry):
            continue
        if entry.is_dir():
            ignore = shutil.ignore_patterns(".*", *(f"*{end}" for end in OTHERS), "*.index.json")
            shutil.copytree(entry, out / entry.name, ignore=ignore)
        elif entry.is_file():
            shutil.copyfile(entry, out / entry.name)


def _holds_weights(entry: Path) -> bool:
    return entry.name.endswith((*OTHERS, *(f"{end}.index.json" for end in OTHERS)))
