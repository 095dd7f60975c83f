"""The measured choice of kernels: one process measures, a file that cannot be used leaves the built-in table."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu import backend as cpu_backend
from trencadis.backends.cpu import measured_kernel_choice as kernel_choice
from trencadis.backends.cpu.backend import CpuBackend
from trencadis.backends.cpu.measured_kernel_choice import KernelChoice
from trencadis.backends.cpu.native import kernel_library
from trencadis.backends.cpu.native.kernel_choice_by_cpu import (
    ANY,
    BFLOAT16,
    FLOAT32,
    SHARED_ROWS,
    TORCH,
    VARIABLE,
    KernelTable,
    Op,
    chosen_table,
    table_of,
    with_choice,
)  # fmt: skip
from trencadis.backends.cpu.ops import CpuOps
from trencadis.core.device.backend import BackendConfig, Segments
from trencadis.core.engine.engine_builder import trial_folder
from trencadis.core.engine_config import EngineConfig

ZEN4 = {"avx2", "avx512", "avx512_vnni", "avx512_bf16"}
BUILT_IN = table_of("avx512_vnni", ZEN4)
OTHER = KernelChoice(64, 0, 0)


@pytest.fixture(autouse=True)
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes every measurement give ``OTHER``, and returns what was measured."""
    found = list[str]()

    def measure(table: KernelTable, dtype: torch.dtype) -> KernelChoice:
        found.append(str(dtype))
        return OTHER

    monkeypatch.setattr(kernel_choice, "measure", measure)
    return found


def choose(folder: Path | None, threads: int = 2) -> KernelTable:
    return kernel_choice.choose_table(BUILT_IN, torch.bfloat16, threads, folder)


def only_file(folder: Path) -> Path:
    return next(folder.glob("*.json"))


def test_a_choice_limits_what_the_table_has() -> None:
    made = with_choice(BUILT_IN, BFLOAT16, *OTHER)
    assert made.most_rows(Op.LINEAR, BFLOAT16) == 64 and made.most_rows(Op.LINEAR, FLOAT32) == SHARED_ROWS
    assert not made.bfloat16_pairs and not made.serves(Op.WINDOWS, BFLOAT16) and made.serves(Op.ATTENTION, BFLOAT16)
    assert made.digest != BUILT_IN.digest and made.digest in made.line() and "measured" in made.line()
    assert BUILT_IN.digest in BUILT_IN.line() and "built in" in BUILT_IN.line()
    same = with_choice(BUILT_IN, BFLOAT16, *kernel_choice.choice_of(BUILT_IN, BFLOAT16))
    assert same.digest == BUILT_IN.digest
    skylake = table_of("avx512", {"avx2", "avx512"})
    more = with_choice(skylake, BFLOAT16, 64, 1, 1)
    assert more.most_rows(Op.LINEAR, BFLOAT16) == ANY and not more.bfloat16_pairs
    assert not with_choice(table_of(TORCH, ZEN4), BFLOAT16, 64, 1, 1).rows


def test_the_first_start_measures_and_later_ones_read(measured: list[str], tmp_path: Path) -> None:
    first, second = choose(tmp_path), choose(tmp_path)
    assert len(measured) == 1 and first == second == with_choice(BUILT_IN, BFLOAT16, *OTHER)
    choose(tmp_path, threads=1)
    kernel_choice.choose_table(BUILT_IN, torch.float32, 2, tmp_path)
    assert len(measured) == 3, "other numbers of threads and other types are measured by themselves"


def test_another_version_of_the_kernels_is_measured_anew(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(tmp_path)
    monkeypatch.setattr(kernel_library, "VERSION", "of tomorrow")
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        assert choose(tmp_path) == with_choice(BUILT_IN, BFLOAT16, *OTHER)
    assert len(measured) == 2 and len(list(tmp_path.glob("*.json"))) == 2 and not caplog.records


@pytest.mark.parametrize("harm", ["cpu", "features", "torch", "kernels", "short", "empty", "list", "choice", "below 0"])
def test_a_file_that_cannot_be_used_leaves_the_built_in_table(
    harm: str, measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choose(tmp_path)
    file = only_file(tmp_path)
    held = json.loads(file.read_text())
    if harm in held["machine"]:
        held["machine"][harm] = "another"
    elif harm == "choice":
        held["choice"]["rows"] = "many"
    elif harm == "below 0":
        held["choice"]["rows"] = -1
    text = json.dumps([] if harm == "list" else held)
    text = {"short": text[: len(text) // 2], "empty": ""}.get(harm, text)
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        assert choose(tmp_path) is BUILT_IN
    assert len(measured) == 1 and len(caplog.records) == 1 and str(file) in caplog.messages[0]
    assert file.read_text() == text


def test_without_a_folder_that_can_be_written_nothing_is_measured(
    measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        assert choose(tmp_path / "file") is BUILT_IN and not measured
    assert len(caplog.records) == 1


def test_requested_kernels_and_fixed_bits_are_not_measured(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(None) is BUILT_IN
    assert kernel_choice.choose_table(table_of(TORCH, ZEN4), torch.float32, 2, tmp_path).kind == TORCH
    monkeypatch.setenv(VARIABLE, "avx2")
    assert choose(tmp_path) is BUILT_IN
    assert not measured and not list(tmp_path.iterdir())
    assert trial_folder(EngineConfig(kernel_trial=False)) is None
    assert trial_folder(EngineConfig(batch_invariant=True)) is None
    assert trial_folder(EngineConfig(packed_weights_dir=str(tmp_path))) == tmp_path
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    assert trial_folder(EngineConfig()) == tmp_path / "measured"
    made = CpuBackend(BackendConfig(kernel_trial=tmp_path, batch_invariant=True))
    assert isinstance(made.ops, CpuOps) and not made.ops.table.measured and not measured


def start_replica(folder: Path, counted: Path) -> None:
    """Chooses a table as a replica does; notes that it measures."""

    def measure(table: KernelTable, dtype: torch.dtype) -> KernelChoice:
        with counted.open("a") as out:
            out.write("measured\n")
        time.sleep(0.2)
        return OTHER

    kernel_choice.measure = measure
    assert choose(folder) == with_choice(BUILT_IN, BFLOAT16, *OTHER)


def test_one_of_several_processes_measures(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=start_replica, args=(tmp_path, tmp_path / "counted")) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert (tmp_path / "counted").read_text() == "measured\n"


class Ranks:
    """A communicator of two ranks, of which the other's values are given."""

    rank = 0

    def __init__(self, others: tuple[int, ...]) -> None:
        self.others = others

    def least(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(a, b) for a, b in zip(values, self.others, strict=True))


def test_all_ranks_take_the_table_of_the_first(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = (kernel_choice.UNCHANGED,) * 3
    digests = set[str]()
    for number, others in ((0, (*none, 1)), (1, (*OTHER, 1))):
        monkeypatch.setattr(cpu_backend, "make_comm", lambda cfg, others=others: Ranks(others))
        made = CpuBackend(BackendConfig(torch.bfloat16, rank=number, world=2, kernel_trial=tmp_path))
        assert isinstance(made.ops, CpuOps)
        digests.add(made.ops.table.digest)
    table = chosen_table()
    assert digests == {(with_choice(table, BFLOAT16, *OTHER) if table.number else table).digest}
    assert len(measured) == int(table.number > 0), "rank 0 alone measures"


@pytest.mark.skipif(not kernel_kinds.OWN, reason="own kernels are not built here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measurement_is_bounded_and_allowed_choices_result(dtype: torch.dtype) -> None:
    table = kernel_kinds.table(kernel_kinds.OWN[-1])
    begun = time.process_time()
    found = kernel_choice.measure(table, dtype)
    taken = time.process_time() - begun
    assert taken < 2 * kernel_choice.SECONDS * torch.get_num_threads()
    built_in = kernel_choice.choice_of(table, str(dtype).removeprefix("torch."))
    assert (
        found.rows in (built_in.rows, *kernel_choice.ROWS, kernel_choice.ROWS[-1] // 2) and found.rows <= built_in.rows
    )
    assert found.pairs <= built_in.pairs and found.windows <= built_in.windows


def test_a_candidate_replaces_the_built_in_choice_if_it_is_faster_in_time() -> None:
    def taking(seconds: float) -> Callable[[], Tensor]:
        def call() -> Tensor:
            time.sleep(seconds)
            return torch.zeros(1)

        return call

    far = time.perf_counter() + 10
    assert kernel_choice._is_faster(taking(0.02), taking(0.005), far)
    assert not kernel_choice._is_faster(taking(0.005), taking(0.005), far)
    assert not kernel_choice._is_faster(taking(0.02), taking(0.005), time.perf_counter())


@pytest.mark.skipif(not kernel_kinds.OWN, reason="own kernels are not built here")
def test_windows_are_left_to_torch_where_it_is_faster() -> None:
    made, q = CpuOps(), torch.randn(64, 2, 16)
    segments = Segments(torch.zeros(1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32))
    table = kernel_kinds.table(kernel_kinds.OWN[-1])
    found = list[Tensor]()
    for windows in (0, 1):
        made.table = with_choice(table, FLOAT32, *kernel_choice.choice_of(table, FLOAT32)._replace(windows=windows))
        with kernel_kinds.served("attention", made.table, bool(windows)):
            found.append(made.attend_windows(q, q, q, segments, 0.25))
    torch.testing.assert_close(found[0], found[1])
