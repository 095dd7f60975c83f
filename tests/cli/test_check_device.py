"""``trencadis check-device`` and ``check-hpu``: one line each, and an exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stubs.gaudi_container import PUBLISHED, put_cards
from trencadis.backends import cuda, hpu
from trencadis.backends.cuda import visible_devices
from trencadis.backends.hpu.start import bridge_loader, gaudi_card_and_plugin_detection
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import Stack
from trencadis.core import devices
from trencadis.core.errors import StartupError
from trencadis.server.cli import check_device, main

pytestmark = pytest.mark.part("gaudi")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command settles this process; what it sets is taken back."""
    for name in ("PT_HPU_LAZY_MODE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr("trencadis.server.processes.signals_and_logging.raise_early_stop", lambda: None)


NOT_PROBED = {
    "send": "it takes two cards", "receive": "it takes two cards",
    "out_of_memory": "it reads the text of an error",
}  # fmt: skip
"""Symbols that no line of ``check-hpu`` calls, and why."""


@pytest.mark.parametrize("lazy", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_an_emulated_card_passes_every_line(
    lazy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every symbol that a start may use has been called by one."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    called: set[str] = set()
    callable_fields: set[str] = set()

    def record(bridge: Any) -> Any:
        def counted(name: str, run: Any) -> Any:
            return lambda *args, **kwargs: (called.add(name), run(*args, **kwargs))[1]

        own = {f.name: getattr(bridge, f.name) for f in dataclasses.fields(bridge) if f.name not in ("device", "hooks")}
        changed = {name: counted(name, value) for name, value in own.items() if callable(value)}
        callable_fields.update(changed)
        return dataclasses.replace(bridge, **changed)

    opened = bridge_loader.open_bridge
    monkeypatch.setattr(bridge_loader, "open_bridge", lambda *args, **kwargs: record(opened(*args, **kwargs)))
    assert main.main(["check-hpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    other = {"compile", "opaque_collectives"} if lazy == "1" else {"wrap_in_hpu_graph"}
    assert callable_fields - called == {*NOT_PROBED, *other}
    status = {what: state for state, what, _ in found["lines"]}
    assert found["exit"] == 0 and found["device"] == "hpu" and status["mode"] == "info"
    kernels = {what.removeprefix("kernel.") for what in status if what.startswith("kernel.")}
    assert {"FusedSDPA", "FusedRMSNorm", "apply_rotary_pos_emb", "index_copy", "index_select", "topk"} <= kernels
    assert {"sdpa_recomp_fwd", "product", "fp8_gemm_v2", "convert_from_uint4", "block_softmax_adjustment"} <= kernels
    assert {"mixture_of_experts", "mixture_of_experts.fp8", "sdpa_recomp_fwd.causal"} <= kernels
    assert {f"FusedSDPA.{form}" for form in ("few", "masked", "masked.fast", "windows")} <= kernels
    beside = (
        "copies",
        "graph" if lazy == "1" else "compiled launch",
        "recurrent layers",
        "collective",
        *(() if lazy == "1" else ("collective in a compiled launch",)),
        "card",
        "views of one upload",
        "store in place",
        "compile-only mode",
        "memory",
    )
    assert {status[what] for what in beside} == {"pass"}
    assert "fail" not in status.values()


def test_a_kernel_that_fails_is_a_line_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def probes(index: int = 0) -> Iterator[tuple[str, Any]]:
        def wrong() -> str:
            raise RuntimeError("Graph compile failed.\nsynStatus=26")

        yield "kernel.topk", wrong
        yield "copies", lambda: "1 GB/s"

    monkeypatch.setattr(hpu, "probes", probes)
    assert main.main(["check-device", "hpu"]) == 1
    said = capsys.readouterr().out
    assert "fail  kernel.topk              RuntimeError: Graph compile failed. synStatus=26\n" in said
    assert "pass  copies" in said and said.endswith("hpu: 1 passed, 1 failed\n")


def test_a_stack_that_cannot_start_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_cards(tmp_path, 1)
    monkeypatch.setenv("TRENCADIS_MACHINE_ROOT", str(tmp_path))
    for built, says in (("2.11.0", "was built for torch 2.11.0"), ("2.13.0", "card 3 is")):
        found = Stack(PUBLISHED["2.13.0+cpu"], "2.13.0+cpu", built, True)
        monkeypatch.setattr(gaudi_card_and_plugin_detection, "find_stack", lambda found=found: found)
        assert main.main(["check-hpu", "3"]) == 2
        said = capsys.readouterr().out
        assert says in said and said.endswith("hpu:3: 0 passed, 1 failed\n")


def test_the_cpu_has_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check-device", "cpu"]) == 0
    said = capsys.readouterr().out
    for what in ("torch  ", "op.linear", "op.attend_images", "copies", "none  graph"):
        assert what in said


def test_words_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--fast"], ["cpu", "cuda"]):
        with pytest.raises(StartupError, match="check-device does not know"):
            check_device.parse(words)
    assert check_device.parse(["1"], "hpu") == ("hpu:1", False) and check_device.parse([]) == ("auto", False)
    assert main.main(["check-hpu", "--help"]) == 0 and "check-NAME" in capsys.readouterr().out
    assert main.main(["check-nothing"]) == 2


def test_devices_lists_cards_by_what_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_cards(tmp_path, 4)
    monkeypatch.setenv("TRENCADIS_MACHINE_ROOT", str(tmp_path))
    monkeypatch.setattr(cuda, "listing", lambda: ["cuda:0"])
    assert [line for line in devices.describe_devices() if line.startswith("hpu")] == [
        f"hpu:{i}    Gaudi, module {i}" for i in range(4)
    ]
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "3,1")
    assert [line for line in devices.describe_devices() if line.startswith("hpu")] == [
        "hpu:0    Gaudi, module 3", "hpu:1    Gaudi, module 1",
    ]  # fmt: skip


UUIDS = "GPU-8a5c2f1e-1234-5678-9abc-def012345678,GPU-11112222"


def test_cuda_cards_are_named_by_index_uuid_or_mig() -> None:
    name = visible_devices.VISIBLE
    assert (
        visible_devices.visible({}) is None
        and visible_devices.visible({name: ""}) == visible_devices.visible({name: "-1"}) == ()
    )
    assert (
        visible_devices.visible({name: "2, 0"}) == ("2", "0") and len(visible_devices.visible({name: UUIDS}) or ()) == 2
    )
    for mig in ("MIG-8a5c2f1e-1234-5678-9abc-def012345678", "MIG-GPU-8a5c2f1e/1/0"):
        assert visible_devices.visible({name: mig}) == (mig,)
        assert "one card by MIG instance" in visible_devices.settle({name: mig}).lines[0]
    assert visible_devices.settle({}).lines == () and "hides all cards" in visible_devices.settle({name: "-1"}).lines[0]
    assert "2 cards by UUID, counted from 0 here" in visible_devices.settle({name: UUIDS}, 1).lines[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [("0,GPU-11112222", "mixes kinds"), ("0,0", "names a card twice"), ("all", "names no card"),
     ("0,,1", "names no card"),
     ("MIG-1111,MIG-2222", "one MIG instance"), ("0;1", "names no card")],
)  # fmt: skip
def test_a_list_that_cuda_would_cut_is_refused(text: str, says: str) -> None:
    with pytest.raises(StartupError, match=says) as raised:
        visible_devices.visible({visible_devices.VISIBLE: text})
    assert "\n" not in str(raised.value)


def test_more_cuda_cards_than_are_shown_are_refused() -> None:
    with pytest.raises(StartupError, match=r"needs 3 cards, and CUDA_VISIBLE_DEVICES=.* shows 2"):
        visible_devices.settle({visible_devices.VISIBLE: UUIDS}, world=3)
    with pytest.raises(StartupError, match=r"--device cuda:2: .* shows 2, from 0 on"):
        visible_devices.settle({visible_devices.VISIBLE: UUIDS}, 2)
