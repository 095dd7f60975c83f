"""What the loader accepts, and the one line it says where it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.models.model_loader import load_model
from trencadis.core.weight_files import files_of


def load(path: Path, **engine: Any) -> None:
    load_model(load_config(path), make_backend(BackendConfig(options={"threads": "1"})), EngineConfig(**engine))


@pytest.fixture
def copied(vl_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(vl_checkpoint, tmp_path / "copy"))


def test_values_equal_safetensors_own_reader(vl_checkpoint: Path) -> None:
    want = load_file(vl_checkpoint / "model.safetensors")
    got = dict(open_weights(vl_checkpoint))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_shards_and_both_name_styles(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    renames = {"model.visual.": "visual.", "model.language_model.": "model.", "visual.": "model.visual."}
    style = {}
    for name, tensor in tensors.items():
        old = next((o for o in renames if name.startswith(o)), "")
        if not any(n.startswith("model.language_model.") for n in tensors) and name.startswith("model."):
            style["model.language_model." + name.removeprefix("model.")] = tensor
        else:
            style[renames.get(old, "") + name.removeprefix(old)] = tensor
    assert style.keys() != tensors.keys()
    names, index = sorted(style), {}
    for part in range(2):
        held = {n: style[n].contiguous() for n in names[part::2]}
        file = f"model-{part}.safetensors"
        save_file(held, copied / file)
        index |= dict.fromkeys(held, file)
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    load(copied)
    (copied / "model-1.safetensors").unlink()
    with pytest.raises(StartupError, match=r"lacks model-1\.safetensors"):
        load(copied)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.up_proj.weight", "blocks.2.norm2.weight"])
def test_missing_and_misshaped(copied: Path, name: str) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    stored = next(n for n in tensors if n.endswith(name))
    whole = tensors.pop(stored)
    save_file(tensors, file)
    with pytest.raises(StartupError, match="lacks the weight"):
        load(copied)
    save_file({**tensors, stored: whole[:-1].contiguous()}, file)
    with pytest.raises(StartupError, match="has shape"):
        load(copied)


@pytest.mark.parametrize("damage", ["short", "header", "empty"])
def test_unreadable(copied: Path, damage: str) -> None:
    file = copied / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"short": data[:-100], "header": b"\xff" * 200, "empty": b""}[damage])
    with pytest.raises(StartupError, match="not a readable safetensors file"):
        load(copied)


def test_dummy_needs_only_the_config(copied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config-only"
    folder.mkdir()
    shutil.copy(copied / "config.json", folder)
    load(folder, load_format="dummy")
    with pytest.raises(StartupError, match="no weights"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_run(checkpoint: Callable[..., Path], dtype: torch.dtype) -> None:
    path = checkpoint("qwen2", dtype=dtype)
    model = load_model(load_config(path), make_backend(BackendConfig(dtype=dtype, options={"threads": "1"})))
    assert model.nbytes() > 0


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "a\\..\\x", "", 7, None]
)
def test_an_index_names_no_file_outside_the_folder(copied: Path, name: object) -> None:
    (copied / "model.safetensors").rename(copied.parent / "x.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(StartupError, match="no file inside the folder"):
        files_of(copied)


@pytest.mark.parametrize("indexed", [False, True])
def test_links_lead_to_the_folder_or_to_the_blobs_of_its_snapshot(copied: Path, indexed: bool) -> None:
    file = copied / "model.safetensors"
    if indexed:
        (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file.name}}))
    blob = copied.parent / "blobs" / "abc"
    blob.parent.mkdir()
    file.rename(blob)
    file.symlink_to(blob)
    with pytest.raises(StartupError, match=r"is a link to .*/blobs/abc, outside the checkpoint"):
        files_of(copied)
    snapshot = copied.parent / "snapshots" / "main"
    snapshot.parent.mkdir()
    copied.rename(snapshot)
    assert files_of(snapshot) == [snapshot / file.name]
