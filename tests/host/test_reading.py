"""A checkpoint is read before it is needed, and joined and converted in one copy that each weight uses again."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint import weight_prefetch
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.checkpoint.weight_source_interface import StackedPart, stack
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.models.model_loader import load_model
from trencadis.core.process import engine_process as process

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"


def collected(dtype: torch.dtype, **options: str) -> CheckpointSource:
    config = load_config(DEMO)
    backend = make_backend(BackendConfig(dtype=dtype, options={"threads": "1", **options}))
    return CheckpointSource(open_weights(DEMO), family_of(config.architecture).names, backend, config)


def parts_of(source: CheckpointSource, layer: int, extra: int = 0) -> tuple[list[StackedPart], int]:
    """Gate and up of a layer, the second without its first row and with ``extra`` zeros."""
    names = [f"layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")]
    size, inputs = source.tensors[names[0]].shape
    return [
        StackedPart(names[0], size, 0, size, size),
        StackedPart(names[1], size, 1, size, size - 1 + extra),
    ], inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_weights_are_those_of_the_file(dtype: torch.dtype) -> None:
    source = collected(dtype)
    for layer, extra in ((0, 3), (1, 0), (0, 5)):
        parts, inputs = parts_of(source, layer, extra)
        found = source.take_stacked(parts, inputs)
        assert found.dtype == dtype and torch.equal(found, stack(source, parts, inputs))


def test_memory_is_used_again_only_where_the_backend_copies_weights() -> None:
    for options, again in (({}, True), ({"ops": "reference"}, False)):
        source = collected(torch.float32, **options)
        first, second = (source.take_stacked(*parts_of(source, layer)) for layer in (0, 1))
        assert (first.data_ptr() == second.data_ptr()) is again
        assert source.copied is again


def test_packed_weights_do_not_share_the_memory_that_they_were_joined_in() -> None:
    ops = make_backend(BackendConfig(options={"threads": "1"})).ops
    x = torch.randn(3, 64)
    for dtype in (torch.float32, torch.float16):
        weight = torch.randn(96, 64).to(dtype)
        packed = ops.pack_weight(weight)
        before = ops.linear(x.to(dtype), packed)
        weight.fill_(float("nan"))
        assert ops.copies and torch.equal(ops.linear(x.to(dtype), packed), before), dtype


def test_the_start_says_how_fast_weights_were_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        load_model(load_config(DEMO), make_backend(BackendConfig(options={"threads": "1"})))
    assert any(r.message.startswith("weights: 0.") and r.message.endswith("GB/s") for r in caplog.records)


def test_files_are_asked_for_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Imported(Exception):
        pass

    seen: list[tuple[Any, ...]] = []

    def load() -> None:
        raise Imported

    monkeypatch.setattr("trencadis.core.checkpoint.weight_prefetch.start_prefetch", lambda *args: seen.append(args))
    monkeypatch.setattr("trencadis.core.process.torch_detection.import_torch", load)
    engine = object.__new__(process.EngineProcess)
    monkeypatch.setattr(engine, "send", lambda message: None, raising=False)
    with pytest.raises(Imported):
        engine.load(EngineConfig(model=str(DEMO), device="cpu"))
    assert seen == [(str(DEMO), "auto", None)]


def test_what_cannot_be_read_ahead_is_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    monkeypatch.setattr("os.posix_fadvise", lambda *args: requested.append(args))
    thread = weight_prefetch.start_prefetch(str(DEMO))
    assert thread is not None
    thread.join(10)
    assert sum(args[2] for args in requested) == open_weights(DEMO).nbytes
    assert weight_prefetch.start_prefetch(str(DEMO), "dummy") is None
    assert weight_prefetch.start_prefetch(str(tmp_path)) is None
    assert weight_prefetch.start_prefetch("some/hub-id") is None
    monkeypatch.setattr(weight_prefetch, "free_host", lambda: 1 << 20)
    assert weight_prefetch.start_prefetch(str(DEMO)) is None


def resident(file: Path) -> int:
    """Bytes of a mapped file that stand in this process's page tables."""
    lines, found = Path("/proc/self/smaps").read_text().splitlines(), 0
    for i, line in enumerate(lines):
        if line.endswith(str(file)):
            found += next(int(text.split()[1]) * 1024 for text in lines[i:] if text.startswith("Rss:"))
    return found


def test_mapped_files_are_entered_beside_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * (1 << 17))
    with file.open("rb") as f:
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        if not Path("/proc/self/smaps").exists():
            pytest.skip("no smaps")
        populating = weight_prefetch.PagePopulator([data])
        populating.wait()
        populating.end()
        if resident(file) == 0:
            pytest.skip("this kernel has no MADV_POPULATE_READ")
        assert resident(file) >= len(data)
        assert data[1000] == 1000 % 256
        data.close()
    monkeypatch.setattr(weight_prefetch, "free_host", lambda: 1 << 20)
    with file.open("rb") as f:
        untouched = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        weight_prefetch.PagePopulator([untouched]).end()
        assert resident(file) < len(untouched)
        untouched.close()
