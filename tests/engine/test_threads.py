"""How many CPU threads an engine takes: --threads, else OMP_NUM_THREADS, else the cores of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trencadis.backends.cpu.backend import CpuBackend, warn_of_threads
from trencadis.core.cpu_affinity import available_cpus, computing_cpus
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.engine_process_launcher import make_child_config, make_child_environment


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("requested", "variable", "found"), [(None, "3", 3), (5, "3", 5), (None, "", computing_cpus())]
)
def test_an_engine_takes_the_threads_that_were_asked_for(
    requested: int | None, variable: str, found: int, vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = EngineConfig(str(vl_checkpoint), kv_cache_memory_bytes=1 << 22, threads=requested, device="cpu")
    engine = create_engine(config)
    assert engine.info().device == f"cpu ({found} threads)"
    engine.close()


SHARED = [(None, "6", 6), (8, "6", 8), (None, "", computing_cpus())]


@pytest.mark.parametrize(("requested", "variable", "all_ranks"), SHARED)
def test_ranks_share_the_threads_of_the_engine(requested: int | None, variable: str, all_ranks: int) -> None:
    """The child of a server sees its share in the environment; the configuration holds the whole."""
    config, environ = EngineConfig("m", threads=requested, tensor_parallel_size=2), {"OMP_NUM_THREADS": variable}
    assert make_child_config(config, environ).threads == all_ranks
    assert make_child_environment(config, environ)["OMP_NUM_THREADS"] == str(max(all_ranks // 2, 1))


def test_a_core_counts_once_whatever_its_threads(tmp_path: Path) -> None:
    """Four cores of two threads each: CPU n and n + 4 are one core."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    nothing, least = tmp_path / "none", computing_cpus(tmp_path / "none")
    for usable, cores in ((range(8), 4), ((0, 4), 1), ((0, 1, 5), 2), ((), least), ((9,), least)):
        assert computing_cpus(nothing, tmp_path, usable) == min(cores, available_cpus(nothing)), usable
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert computing_cpus(tmp_path, tmp_path, range(8)) == 1


def test_more_threads_than_cores_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Of the first rank alone; as many threads as cores are none."""
    cores = available_cpus()
    for count, number, warnings in ((cores, 0, 0), (cores + 1, 0, 1), (cores + 1, 1, 0)):
        caplog.clear()
        warn_of_threads(count, BackendConfig(rank=number, options={"threads": str(count)}))
        assert len(caplog.records) == warnings
    CpuBackend(BackendConfig(options={"threads": str(cores + 1)}))
    found = [record for record in caplog.records if "lower --threads" in record.getMessage()]
    assert len(found) == 1
