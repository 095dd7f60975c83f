"""Weights that torch.save wrote: read without unpickling, equal to torch's own reader, served like safetensors."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.families.test_same_tokens import answered, prompts
from trencadis.core.checkpoint.checkpoint_weight_source import canonical
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import open_weights, read_file
from trencadis.core.errors import StartupError
from trencadis.core.weight_files import files_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def check(file: Path) -> dict[str, torch.Tensor]:
    """Ours equals torch's in names, their order, values, types, shapes and strides."""
    want = torch.load(file, weights_only=True)
    got = dict(read_file(file, []))
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert got[name].stride() == tensor.stride() and torch.equal(bits(got[name]), bits(tensor)), name
    return got


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_every_type_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 20
    torch.save({str(t): values.to(t) for t in DTYPES}, tmp_path / "pytorch_model.bin")
    check(tmp_path / "pytorch_model.bin")


def test_views_strides_and_tied_storages_are_those_of_torch(tmp_path: Path) -> None:
    base = torch.randn(6, 8, 3)
    held = OrderedDict(
        base=base, tied=base, turned=base.permute(2, 0, 1), rows=base[1:5:2], column=base[:, 3], inner=base[2, 1:4, 1:],
        scalar=torch.tensor(3.5), empty=torch.empty(0, 4), parameter=torch.nn.Parameter(base[0].clone()),
        frozen=torch.nn.Parameter(base[1].half(), requires_grad=False),
    )  # fmt: skip
    torch.save(held, tmp_path / "pytorch_model.bin")
    got = check(tmp_path / "pytorch_model.bin")
    assert got["tied"].data_ptr() == got["base"].data_ptr(), "a copy of a tied tensor"
    assert got["column"].data_ptr() == got["base"].data_ptr() + 9 * 4


def test_modules_write_versions_beside_their_tensors(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    assert len(check(tmp_path / "pytorch_model.bin")) == 7


def test_thousands_of_tensors_need_the_longer_opcodes(tmp_path: Path) -> None:
    torch.save({f"layers.{i}.weight": torch.full((2,), i) for i in range(1500)}, tmp_path / "pytorch_model.bin")
    check(tmp_path / "pytorch_model.bin")


def test_archives_without_checksums_or_alignment(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(9.0)}, file)
    finally:
        torch.serialization.set_crc32_options(before)
    check(file)
    torch.save({"a": torch.arange(9.0), "b": torch.arange(5).double()}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "other.bin", "w") as new:
        for i, name in enumerate(old.namelist()):
            with new.open(zipfile.ZipInfo(name), "w", force_zip64=bool(i % 2)) as out:
                out.write(old.read(name))
    check(tmp_path / "other.bin")


def test_sharded_files_are_those_that_the_index_names(tmp_path: Path) -> None:
    parts = [{"a": torch.ones(2), "b": torch.zeros(3)}, {"c": torch.arange(4.0)}]
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, tmp_path / name)
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    assert files_of(tmp_path) == [tmp_path / name for name in names]
    index = tmp_path / "pytorch_model.bin.index.json"
    where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    want = {**parts[0], **parts[1]}
    got = dict(open_weights(tmp_path))
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    (tmp_path / names[1]).unlink()
    with pytest.raises(StartupError, match=r"lacks pytorch_model-00002-of-00002\.bin \(1 of 2 weight files missing\)"):
        files_of(tmp_path)
    for outside in ("../x.bin", "/etc/passwd", "a/../../x.bin", "", 7, ["a"]):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        with pytest.raises(StartupError, match=r"no file inside the folder|is no index of bin files"):
            files_of(tmp_path)


def test_load_format_says_which_files_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    pickled = [tmp_path / "pytorch_model.bin"]
    assert files_of(tmp_path) == files_of(tmp_path, "pt") == pickled
    with pytest.raises(StartupError, match=r"holds PyTorch \.bin weights, which --load-format auto reads; supported"):
        open_weights(tmp_path, load_format="safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert files_of(tmp_path) == files_of(tmp_path, "safetensors") == [tmp_path / "model.safetensors"]
    assert files_of(tmp_path, "pt") == pickled
    pickled[0].unlink()
    with pytest.raises(StartupError, match=r"holds no weights; supported: pytorch_model\.bin \("):
        files_of(tmp_path, "pt")


def test_old_names_of_norms() -> None:
    names = family_of("OPTForCausalLM").names
    for kind, old in (("weight", "gamma"), ("bias", "beta")):
        stored = "model.decoder.layers.0.self_attn_layer_norm."
        assert canonical(stored + old, names) == canonical(stored + kind, names) == f"layers.0.input_layernorm.{kind}"


def as_bin(source: Path, folder: Path, shards: int) -> Path:
    """The same checkpoint with its weights as torch.save writes them."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    if shards == 1:
        torch.save(OrderedDict(tensors), folder / "pytorch_model.bin")
        return folder
    where = {name: f"pytorch_model-0000{i % shards + 1}-of-0000{shards}.bin" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        torch.save({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize(("family", "shards"), [("opt", 1), ("qwen2", 2)])
def test_tokens_are_those_of_the_same_weights_in_safetensors(
    form: Any, checkpoint: Any, tmp_path: Path, family: str, shards: int
) -> None:
    source = form("opt", "125m") if family == "opt" else checkpoint("qwen2")
    requested = prompts(4, 40)
    made = [answered(path, requested, 12) for path in (source, as_bin(source, tmp_path / "bin", shards))]
    assert made[0] == made[1]
    with pytest.raises(StartupError, match="which --load-format auto reads"):
        answered(tmp_path / "bin", requested, 1, load_format="safetensors")
