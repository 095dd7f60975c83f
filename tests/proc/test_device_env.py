"""Every process settles its device before it imports torch: engine, ranks, the server for its engine, offline use."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.stubs.gaudi_container import put_cards
from trencadis import llm_engine
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import Stack
from trencadis.core import devices
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import engine_process_launcher, multiproc_executor, rank_messages, rank_process
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.process import engine_process, torch_detection
from trencadis.server.cli import check_backend_and_compare_model

pytestmark = pytest.mark.part("gaudi")


class Ended(Exception):
    """The step that would load a model."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in turn."""
    found: list[Any] = []

    def settle(requested: str, environ: Any = None, rank: int = 0, world: int = 1) -> devices.DeviceEnv:
        found.append(("settle", requested, rank, world))
        return devices.DeviceEnv({}, ("a line",))

    def stop(*args: Any, **kwargs: Any) -> Any:
        found.append("factory")
        raise Ended

    monkeypatch.setattr(torch_detection, "prepare_device_env", settle)
    monkeypatch.setattr(torch_detection, "import_torch", lambda: found.append("torch"))
    monkeypatch.setattr(engine_process, "find_factory", stop)
    monkeypatch.setattr(rank_process, "build", stop)
    monkeypatch.setattr("trencadis.core.engine.engine_builder.create_engine", stop)
    monkeypatch.setattr(check_backend_and_compare_model, "import_module", stop)
    return found


CONFIG = EngineConfig(device="hpu", tensor_parallel_size=2)


def test_the_engine(order: list[Any]) -> None:
    process = engine_process.EngineProcess.__new__(engine_process.EngineProcess)
    process.send = lambda message: None  # type: ignore[assignment]
    with pytest.raises(Ended):
        process.load(CONFIG)
    assert order == [("settle", "hpu", 0, 2), "torch", "factory"]


def test_a_rank(order: list[Any]) -> None:
    process = rank_process.RankProcess.__new__(rank_process.RankProcess)
    process.queue, process.connect_info = SimpleQueue(), None
    process.queue.put(rank_messages.StartRank(CONFIG, RankInfo(1, 2, ""), multiproc_executor.FACTORY))
    with pytest.raises(Ended):
        process.serve()
    assert order == [("settle", "hpu", 1, 2), "torch", "factory"]


def test_offline(order: list[Any]) -> None:
    with pytest.raises(Ended):
        llm_engine._start_engine(CONFIG, None)
    assert order == [("settle", "hpu", 0, 2), "torch", "factory"]


def test_the_checks(order: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trencadis.server.processes.signals_and_logging.raise_early_stop", lambda: None)
    with pytest.raises(Ended):
        check_backend_and_compare_model.main(["hpu"])
    assert order == [("settle", "hpu", 0, 1), "torch", "factory"]


def test_the_server_for_its_engine(order: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "trencadis.server"):
        engine_process_launcher.make_child_environment(CONFIG, {})
    assert order == [("settle", "hpu", 0, 2)] and caplog.messages == ["a line"]
    engine_process_launcher.make_child_environment(EngineConfig(engine="tests.fakes.scripted:make"), {})
    assert len(order) == 1, "a scripted engine has no device"


def test_a_start_that_cannot_succeed_ends_before_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_cards(tmp_path, 1)
    monkeypatch.setenv("TRENCADIS_MACHINE_ROOT", str(tmp_path))
    monkeypatch.setattr(
        gaudi_card_and_plugin_detection, "find_stack", lambda: Stack("1.24.2.31", "2.11.0+cpu", "2.13.0", True)
    )
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("an engine was started"))
    with pytest.raises(StartupError, match=r"was built for torch 2\.13\.0 and torch 2\.11\.0\+cpu is installed"):
        engine_process_launcher.spawn_engine(EngineConfig(device="hpu"))


def test_a_torch_that_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a plug-in that torch imports by itself."""
    import builtins

    real = builtins.__import__
    for error, says in (
        (
            RuntimeError("Failed to load the backend extension: device_backend."),
            "AUTOLOAD=0 keeps it out",
        ),
        (OSError("libtorch_cpu.so: cannot open shared object file"), "install it again"),
    ):

        def fail(name: str, *args: Any, error: Exception = error) -> Any:
            if name == "torch":
                raise error
            return real(name, *args)

        with monkeypatch.context() as patched:
            patched.setattr(builtins, "__import__", fail)
            with pytest.raises(StartupError, match=says) as raised:
                torch_detection.import_torch()
        assert "\n" not in str(raised.value)
