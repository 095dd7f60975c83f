"""Where an engine's cards are when no ``--distributed-executor-backend`` is named: here, or else on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stubs.gaudi_container import put, put_cards
from trencadis.backends import cuda
from trencadis.backends.cuda import visible_devices
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection as hpu_machine
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import Stack
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import ray_engines
from trencadis.core.executor.ray_engines import RayEngines
from trencadis.core.links import rank_placement
from trencadis.llm_engine import _start_engine
from trencadis.server.processes.start_engines import start_engines

Machine = Callable[[int], dict[str, str]]


def engine(device: str = "cuda", ranks: int = 2, **more: Any) -> EngineConfig:
    return EngineConfig(device=device, tensor_parallel_size=ranks, engine="tests.fakes.scripted:make", **more)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Puts that many cards of both kinds into a machine without Ray; returns the environment of a process there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(rank_placement, "find_spec", lambda name: None)
    monkeypatch.setattr(hpu_machine, "find_stack", lambda: Stack("1.24.2.31", "2.13.0+cpu", "2.13.0", True))

    def made(count: int) -> dict[str, str]:
        root = tmp_path / "machine"
        put_cards(root, count)
        for number in range(count):
            put(root / f"dev/nvidia{number}", "")
        monkeypatch.setattr(cuda, "count_cards", lambda: visible_devices.count_cards(root))
        return {"TRENCADIS_MACHINE_ROOT": str(root)}

    return made


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Ray that is installed and has no cluster; returns the file that says who has imported it."""
    monkeypatch.setattr(rank_placement, "find_spec", lambda name: SimpleNamespace(name=name))
    seen = tmp_path / "imported"
    text = f"open({str(seen)!r}, 'a').write('imported ')\n__version__ = '2.60.0'\n"
    text += "def init(**options):\n    raise ConnectionError(options['address'])\n"
    put(tmp_path / "installed" / "ray" / "__init__.py", text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'installed'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return seen


@pytest.mark.parametrize("device", ["cuda", "hpu"])
def test_cards_that_are_here_are_used_and_else_ray_is_asked(device: str, machine: Machine, ray: Path) -> None:
    environ = machine(2)
    requested = engine(device)
    assert rank_placement.choose_executor_backend(requested, environ) == (requested, "")
    four = engine(device, 2, pipeline_parallel_size=2)
    found, line = rank_placement.choose_executor_backend(four, environ)
    assert found == replace(four, distributed_executor_backend="ray")
    assert line.startswith(
        "4 ranks (--tensor-parallel-size times --pipeline-parallel-size) need 4 cards and there are 2"
    )
    assert line.endswith("Ray is asked for them (--distributed-executor-backend mp: only this machine)")
    assert rank_placement.choose_executor_backend(found, environ) == (found, ""), "once is enough"
    assert not ray.exists(), "what decides does not import Ray"


@pytest.mark.parametrize("device", ["cuda", "hpu"])
def test_a_server_without_cards_joins_the_cluster_that_is_named(device: str, machine: Machine) -> None:
    environ = machine(0)
    one = engine(device, 1)
    assert rank_placement.choose_executor_backend(one, environ) == (one, ""), "the device says why there is none"
    found, line = rank_placement.choose_executor_backend(one, {**environ, "RAY_ADDRESS": "10.0.0.1:6379"})
    assert found.distributed_executor_backend == "ray"
    assert line.startswith(f"--device {device} needs a card and there ")


@pytest.mark.parametrize(
    ("device", "hidden", "words"),
    [
        ("cuda", {}, "there are 2 here"), ("hpu", {}, "there are 2"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES=1 shows 1"),
        ("hpu", {"HABANA_VISIBLE_MODULES": "1"}, "HABANA_VISIBLE_MODULES=1 names 1"),
    ],
)  # fmt: skip
def test_without_ray_one_line_has_both_remedies(device: str, hidden: Any, words: str, machine: Machine) -> None:
    with pytest.raises(StartupError, match=r"^4 ranks \(--tensor-parallel-size\) need 4 cards and ") as raised:
        rank_placement.choose_executor_backend(engine(device, 4), {**machine(2), **hidden})
    said = str(raised.value)
    assert f"and {words}: take fewer" in said and "--nnodes" in said and "pip install 'trencadis[ray]'" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ({"device": "cpu"}, {}), ({"device": "cuda:0"}, {}), ({"policy": "twin"}, {}),
        ({}, {"TRENCADIS_CUDA_TWIN": "1"}), ({"device": "hpu"}, {"TRENCADIS_HPU_EMULATOR": "1"}),
        ({"nnodes": 2}, {}), ({"headless": True, "nnodes": 2, "node_rank": 1}, {}),
        ({"distributed_executor_backend": "mp"}, {}), ({"distributed_executor_backend": "external_launcher"}, {}),
    ],
)  # fmt: skip
def test_who_has_a_place_keeps_it(flags: dict[str, Any], more: dict[str, str], machine: Machine, ray: Path) -> None:
    requested = engine(ranks=4, **flags) if "device" not in flags else engine(flags["device"], 4)
    assert rank_placement.choose_executor_backend(
        requested, {**machine(1), **more, "RAY_ADDRESS": "10.0.0.1:6379"}
    ) == (
        requested,
        "",
    )


def test_cards_are_counted_before_their_device_files_are_made(tmp_path: Path) -> None:
    assert visible_devices.count_cards(tmp_path) == 0
    put(tmp_path / "proc/driver/nvidia/version", "610.1")
    assert visible_devices.count_cards(tmp_path) is None, "a driver that shows none is asked by its library alone"
    for name in ("01", "02", "03"):
        put(tmp_path / f"proc/driver/nvidia/gpus/0000:{name}:00.0/information", "")
    put(tmp_path / "dev/nvidia0", "")
    put(tmp_path / "dev/nvidiactl", "")
    assert visible_devices.count_cards(tmp_path) == 3


def test_a_server_that_finds_no_cluster_says_how_to_start_one(machine: Machine, ray: Path, caplog: Any) -> None:
    machine(1)
    with pytest.raises(StartupError, match=r"^no Ray cluster runs on this machine: `ray start --head` starts one"):
        start_engines(engine(), 1, "mp", lambda handle: None)
    assert set(ray.read_text().split()) == {"imported"}, "by the processes that ask the cluster"
    assert "ray" not in sys.modules
    assert caplog.messages[0].startswith("2 ranks (--tensor-parallel-size) need 2 cards and there is 1 here: Ray is")


def test_an_offline_model_asks_ray_too(machine: Machine, ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1)
    monkeypatch.setattr("trencadis.core.engine.engine_builder.create_engine", lambda config, progress: config)
    found: Any = _start_engine(engine(), None)
    assert found.distributed_executor_backend == "ray" and not ray.exists()


def test_an_engine_that_ray_places_asks_for_no_other_place(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """The server's own node needs no card."""
    placed: list[EngineConfig] = []

    class Elsewhere(RayEngines):
        max_per_node = 1

        def __init__(self, config: EngineConfig, engines: int, multi_node: bool = False) -> None:
            placed.append(config)

        def start_engine(self, number: int, config: EngineConfig) -> Any:
            placed.append(config)

    monkeypatch.setattr(ray_engines, "RayEngines", Elsewhere)
    for name, value in {**machine(0), "RAY_ADDRESS": "10.0.0.1:6379"}.items():
        monkeypatch.setenv(name, value)
    start_engines(engine(), 2, "ray", lambda handle: None)
    assert [one.distributed_executor_backend for one in placed] == ["mp"] * 3
