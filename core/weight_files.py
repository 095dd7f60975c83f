"""Finds the files of a checkpoint folder that hold its weights. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trencadis.core.errors import StartupError

MAX_HEADER = 100 << 20
"""Most bytes of the header of a safetensors file, as the format says."""


def files_of(path: Path, load_format: str = "auto") -> list[Path]:
    """Returns the weight files of a folder.

    Args:
        load_format: safetensors, pt (only ``pytorch_model.bin``), or auto: safetensors if there are any, else pt.

    Raises:
        StartupError: there are none, some are missing, or one lies outside the folder.
    """
    found: list[Path] = []
    if load_format != "pt":
        found = _list_files(path, "model.safetensors", "*.safetensors")
    if not found and load_format != "safetensors":
        found = _list_files(path, "pytorch_model.bin", "pytorch_model-*.bin")
    if not found:
        held = "no weights"
        if load_format == "safetensors" and any(path.glob("pytorch_model*.bin")):
            held = "PyTorch .bin weights, which --load-format auto reads"
        kinds = {"safetensors": "safetensors", "pt": "pytorch_model.bin"}.get(
            load_format, "safetensors, pytorch_model.bin"
        )
        raise StartupError(f"{path} holds {held}; supported: {kinds} (or --load-format dummy)")
    return found


def _list_files(path: Path, single: str, pattern: str) -> list[Path]:
    """Returns the files listed in the index of ``single``, else ``single``, else those matching ``pattern``."""
    index = path / f"{single}.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise StartupError(f"{index} is no index of {single.rpartition('.')[2]} files") from None
        for name in names:
            if not isinstance(name, str) or name.startswith(("/", "\\")) or {"", ".."} & set(re.split(r"[/\\]", name)):
                raise StartupError(f"{index} names {str(name)[:80]!r}, which is no file inside the folder")
        missing = [n for n in names if not (path / n).is_file()]
        if missing:
            raise StartupError(f"{path} lacks {missing[0]} ({len(missing)} of {len(names)} weight files missing)")
        return _inside(path, [path / n for n in names])
    whole = path / single
    return _inside(path, [whole] if whole.is_file() else sorted(path.glob(pattern)))


def _inside(path: Path, files: list[Path]) -> list[Path]:
    """Checks that no file is a link to outside the folder; returns ``files``.

    A snapshot in the hub's cache consists of links to blobs of its own repository, which count as inside.
    """
    root = path.resolve()
    root = root.parent.parent if root.parent.name == "snapshots" else root
    for file in files:
        if not file.resolve().is_relative_to(root):
            raise StartupError(f"{file} is a link to {file.resolve()}, outside the checkpoint; copy the file there")
    return files


HEAD_STATES = 3
"""Layers of a model whose hidden states a head of EAGLE-3 reads."""

HEAD_TABLE = "embed_tokens.weight"
"""The embedding that some heads of EAGLE-3 have of their own."""


def stores_tensor(path: Path, name: str) -> bool:
    """Returns True if a safetensors file of the folder holds a tensor ``name``; an unreadable one holds none."""
    for file in files_of(path):
        if file.suffix != ".safetensors":
            continue
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if length > MAX_HEADER:
                continue
            try:
                if name in json.loads(f.read(length)):
                    return True
            except (ValueError, TypeError, RecursionError):
                continue  # the loader names the file
    return False
