"""Packed weights that a start keeps in a file are mapped by the next one, and by none whose weights are others."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import kernel_kinds
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.native import weight_packing
from trencadis.backends.cpu.native.kernel_choice_by_cpu import VARIABLE
from trencadis.backends.cpu.native.weight_packing import CachedPages
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.core.checkpoint import weight_prefetch
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.device.packed_weights_file import FORMAT, PackedFile, packed_file
from trencadis.core.engine_config import EngineConfig
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.model_loader import load_model

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
needs_panels = pytest.mark.skipif(
    torch.float32 not in kernel_kinds.shared_types(), reason="weights are not packed here"
)


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernels serve on this CPU otherwise."""
    if kernel_kinds.DENSE:
        monkeypatch.setenv(VARIABLE, kernel_kinds.DENSE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def config_of(checkpoint: Path, **more: Any) -> EngineConfig:
    return EngineConfig(str(checkpoint), packed_weights_dir=str(checkpoint.parent / "kept"), device="cpu", **more)


def file_of(checkpoint: Path) -> PackedFile:
    found = packed_file(config_of(checkpoint))
    assert found is not None
    return found


def started(checkpoint: Path) -> tuple[Decoder, CachedPages]:
    """A model, after its file is written."""
    config = config_of(checkpoint)
    backend = make_backend(BackendConfig(options={"threads": "1"}, packed=packed_file(config)))
    model = load_model(load_config(checkpoint), backend, config)
    assert isinstance(model, Decoder) and isinstance(backend.ops, CpuOps) and isinstance(backend.ops.pages, CachedPages)
    if backend.ops.pages.writing is not None:
        backend.ops.pages.writing.join(60)
    return model, backend.ops.pages


def head(model: Decoder) -> torch.Tensor:
    """What the head makes of some rows."""
    x = torch.randn(3, model.config.text.hidden, generator=torch.Generator().manual_seed(1))
    return model.lm_head(x)


def inner(model: Decoder) -> torch.Tensor:
    x = torch.randn(3, model.config.text.hidden, generator=torch.Generator().manual_seed(2))
    return model.layers[1].mlp(x)


def mapped(pages: CachedPages) -> int:
    """Bytes of weights that came from the file."""
    return sum(pages._mapped)


@needs_panels
def test_the_next_start_maps_what_this_one_packed(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, pages = started(checkpoint)
    assert mapped(pages) == 0 and file_of(checkpoint).path.stat().st_mode & 0o777 == 0o600
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        second, pages = started(checkpoint)
    assert pages.writing is None
    assert mapped(pages) > 0.8 * file_of(checkpoint).path.stat().st_size
    assert torch.equal(head(first), head(second)) and torch.equal(inner(first), inner(second))
    assert any("packed before, mapped" in r.message for r in caplog.records)


@needs_panels
def test_what_is_mapped_is_written_by_nobody(checkpoint: Path) -> None:
    started(checkpoint)
    path = file_of(checkpoint).path
    before = path.read_bytes()
    model, _ = started(checkpoint)
    weight = model.lm_head.weights[0]
    assert isinstance(weight, PackedWeight)
    weight.packed.room.fill_(7)  # type: ignore[attr-defined]
    assert path.read_bytes() == before


@needs_panels
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "visual"])
def test_other_weights_are_found_although_nothing_of_their_file_changed(checkpoint: Path, name: str) -> None:
    """Names, sizes and times are as before: some panels of each weight are compared with the checkpoint."""
    file = checkpoint / "model.safetensors"
    first, _ = started(checkpoint)
    before, tensors = file.stat(), load_file(file)
    found = [n for n in tensors if n == name or (name == "visual" and name in n and n.endswith("qkv.weight"))]
    assert found
    for one in found:
        tensors[one] = tensors[one] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    os.truncate(file, before.st_size) if file.stat().st_size > before.st_size else None
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    if file.stat().st_size != before.st_size:
        pytest.skip("the writer lays the file out in another way")
    _, pages = started(checkpoint)
    assert pages.writing is not None
    plain = load_model(load_config(checkpoint), make_backend(BackendConfig(options={"threads": "1"})))
    third, pages = started(checkpoint)
    assert pages.writing is None and mapped(pages) > 0
    assert isinstance(plain, Decoder)
    assert torch.equal(head(third), head(plain)) and torch.equal(inner(third), inner(plain))
    if name != "visual":
        assert not (torch.equal(head(first), head(third)) and torch.equal(inner(first), inner(third)))


@needs_panels
def test_a_checkpoint_that_was_changed_is_packed_anew(checkpoint: Path) -> None:
    started(checkpoint)
    os.utime(checkpoint / "model.safetensors", (1, 1))
    _, pages = started(checkpoint)
    assert mapped(pages) == 0 and pages.writing is not None
    assert mapped(started(checkpoint)[1]) > 0


def damaged(data: bytes) -> dict[str, bytes]:
    at = len(FORMAT)
    length = int.from_bytes(data[at : at + 8], "little")
    text = data[at + 8 : at + 8 + length]

    def headed(text: bytes) -> bytes:
        made = FORMAT + len(text).to_bytes(8, "little") + text
        return made + data[len(made) :]

    return {
        "empty": b"",
        "a line": FORMAT,
        "cut off": data[: len(data) // 2],
        "cut in its header": data[: at + 20],
        "another format": b"x" + data[1:],
        "a header of all": FORMAT + (1 << 40).to_bytes(8, "little") + data[at + 8 :],
        "no json": headed(b"{" * length),
        "a list": headed(b"[1]".ljust(length)),
        "no pieces": headed(text.replace(b'"pieces"', b'"pisces"')),
        "pieces of text": headed(text.replace(b"[[", b'[["0",', 1)),
        "before the file": headed(text.replace(b", 4096, ", b", -4096, ", 1)),
    }


@needs_panels
def test_a_damaged_file_is_packed_anew(checkpoint: Path) -> None:
    first, _ = started(checkpoint)
    path = file_of(checkpoint).path
    whole = path.read_bytes()
    for what, data in damaged(whole).items():
        path.write_bytes(data)
        assert file_of(checkpoint).read() is None, what
    second, pages = started(checkpoint)
    assert mapped(pages) == 0 and torch.equal(head(first), head(second))
    assert path.read_bytes() == whole


@needs_panels
def test_a_file_without_its_last_pieces_is_completed(checkpoint: Path) -> None:
    started(checkpoint)
    kept = file_of(checkpoint)
    found = kept.read()
    assert found is not None
    data, pieces = found
    whole = kept.path.read_bytes()
    assert kept.write([(p.what, memoryview(data)[p.start : p.start + p.size]) for p in pieces[:3]])
    _, pages = started(checkpoint)
    assert len(pages._mapped) == 3 and kept.path.read_bytes() == whole


def small(tmp_path: Path) -> PackedFile:
    return PackedFile(tmp_path / "kept" / "one.packed", (("model.safetensors", 3, 4),))


PIECES = [("float32 [1, 2]", memoryview(b"a" * 100)), ("float32 [2, 1]", memoryview(b"b" * 4097))]


def test_pieces_come_back_in_their_order(tmp_path: Path) -> None:
    kept = small(tmp_path)
    assert kept.read() is None and kept.write(PIECES)
    found = kept.read()
    assert found is not None
    data, pieces = found
    assert [p.what for p in pieces] == [what for what, _ in PIECES] and all(p.start % 64 == 0 for p in pieces)
    assert [data[p.start : p.start + p.size] for p in pieces] == [bytes(b) for _, b in PIECES]
    assert replace(kept, sources=(("model.safetensors", 3, 5),)).read() is None
    many = [(f"float32 [{i}, {i}]", memoryview(bytes([i % 251]) * 64)) for i in range(1, 3000)]
    assert kept.write(many)  # a header of more than a page
    found = kept.read()
    assert found is not None and [p.what for p in found[1]] == [what for what, _ in many]
    assert all(found[0][p.start] == data[0] for p, (_, data) in zip(found[1], many, strict=True))


def test_one_process_writes(tmp_path: Path) -> None:
    kept = small(tmp_path)
    kept.path.parent.mkdir()
    lock = kept.path.with_name("one.packed.lock")
    with lock.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not kept.write(PIECES) and lock.exists() and not kept.path.exists()
    left = kept.path.with_name("one.packed.abcd.part")
    left.write_bytes(b"left by a process that was killed" * 1000)
    assert kept.write(PIECES) and list(kept.path.parent.iterdir()) == [kept.path]
    assert kept.read() is not None and kept.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["one.packed", "one.packed.part", "one.packed.lock"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "folder"])
def test_nothing_of_another_user_is_read_or_overwritten(name: str, kind: str, tmp_path: Path) -> None:
    """A folder that others can write to: what they put there leads nowhere, and no start waits for it."""
    kept, victim = small(tmp_path), tmp_path / "victim"
    victim.write_bytes(b"precious")
    kept.path.parent.mkdir()
    placed = kept.path.parent / name
    if kind == "link":
        placed.symlink_to(victim)
    elif kind == "hard link":
        placed.hardlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(placed)
    else:
        placed.mkdir()
    assert kept.read() is None
    kept.write(PIECES)
    assert victim.read_bytes() == b"precious"
    if name != "one.packed.lock" and kind != "folder":
        assert kept.read() is not None and not kept.path.is_symlink()


def test_a_file_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = small(tmp_path)
    assert kept.write(PIECES)
    other = os.getuid() + 1
    true_fstat = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda handle: os.stat_result([other if i == 4 else v for i, v in enumerate(true_fstat(handle))])
    )
    assert kept.read() is None and f"it belongs to the user {other}" in caplog.text


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = small(tmp_path)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert not kept.write(PIECES)
    assert list(kept.path.parent.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        assert not kept.write(PIECES)
    assert list(kept.path.parent.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kept").write_text("a file")
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        assert not small(tmp_path).write(PIECES) and small(tmp_path).read() is None
    assert any("packed weights are not kept" in r.message for r in caplog.records)


def test_ranks_types_and_models_have_files_of_their_own(checkpoint: Path) -> None:
    base = config_of(checkpoint)
    others = [
        (base, 1),
        (replace(base, dtype="bfloat16"), 0),
        (replace(base, tensor_parallel_size=2), 0),
        (replace(base, hf_overrides={"tie_word_embeddings": False}), 0),
        (replace(base, model=str(DEMO)), 0),
    ]
    found = [packed_file(*one) for one in [(base, 0), *others]]
    assert len({f.path for f in found if f is not None}) == 1 + len(others)
    assert packed_file(base, 0) == found[0]
    assert packed_file(replace(base, load_format="dummy")) is None and packed_file(replace(base, model="a/b")) is None
    assert packed_file(replace(base, packed_weights_dir="")) is None


def test_snapshots_of_the_hub_are_called_as_their_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--maker--model" / "snapshots" / "0123abcd"
    shutil.copytree(DEMO, folder)
    found = packed_file(config_of(folder))
    assert found is not None and found.path.name.startswith("models--maker--model-")


def test_the_file_is_read_ahead_instead_of_the_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []
    entered: list[weight_prefetch.PagePopulator] = []

    class Seen(weight_prefetch.PagePopulator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            entered.append(self)

    monkeypatch.setattr("os.posix_fadvise", lambda handle, start, size, advice: requested.append(size))
    monkeypatch.setattr(weight_prefetch, "PagePopulator", Seen)

    def begun() -> int:
        thread = weight_prefetch.start_prefetch(str(checkpoint), "auto", kept.path)
        assert thread is not None
        thread.join(10)
        return sum(requested) + sum(p.entered for p in entered)

    kept = file_of(checkpoint)
    assert begun() == sum(requested) == (checkpoint / "model.safetensors").stat().st_size
    requested.clear()
    assert kept.write(PIECES) and begun() == kept.path.stat().st_size
    requested.clear()
    entered.clear()
    monkeypatch.setattr(weight_prefetch, "_madvise", lambda: None)  # a kernel without MADV_POPULATE_READ
    assert begun() == sum(requested) == kept.path.stat().st_size


@needs_panels
def test_only_some_rows_of_the_checkpoint_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(checkpoint)
    packed: list[int] = []

    def counted(call: Any, rows: Any, room: torch.Tensor, kind: int) -> None:
        packed.append(len(room.flatten()))
        _pack(call, rows, room, kind)

    _pack = weight_packing._pack
    monkeypatch.setattr(weight_packing, "_pack", counted)
    _, pages = started(checkpoint)
    # The demo's weights have two to ten panels; those of billions have hundreds.
    assert pages.writing is None and 0 < sum(packed) < 0.7 * mapped(pages)
