"""Pinned memory: which way of making it a plug-in offers, and starts on one that refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hpu.conftest import Run
from tests.hpu.start.test_container import CHAT, SMALL, TOKENS, run
from tests.stubs.gaudi_container import PUBLISHED, make
from trencadis.backends.hpu.start.bridge_loader import find_pinning

pytestmark = pytest.mark.part("gaudi")

PROBES = """
from trencadis.backends.hpu.start import bridge_loader, check_hpu_card
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection as gaudi_detection
gaudi_detection.find_stack = lambda: gaudi_detection.Stack("1.23.1.25", "2.9.0+git1234", "2.9.0", True)
gaudi_detection.find_machine = lambda environ: gaudi_detection.Machine(1, 1)
bridge_loader.DEVICE = "cpu"
bridge = bridge_loader.open_bridge(0)
print(bridge.pinned, len(bridge.notes))
for name in ("pinned_upload", "fetch_beside_launch", "events"):
    print(getattr(check_hpu_card, name)(bridge))
"""


@pytest.mark.parametrize("way", ["", "plain", "refused"])
def test_each_way_is_tried_and_probed(way: str, over_stub: Run) -> None:
    done = over_stub(PROBES, HABANA_STUB_PIN=way)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[0] == ("False 1" if way == "refused" else "True 0")
    assert found[1].startswith("refused" if way == "refused" else "pinned") and len(found) == 4


def test_without_any_way_copies_are_of_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        raise RuntimeError("Pin memory is not supported on HPU")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    found = find_pinning()
    assert not found.pinned and "Pin memory is not supported on HPU" in found.note
    assert found.pin(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["2.9.0+hpu_1.23.1-25.git8598e6d"])
def test_a_start_without_pinned_memory_answers(mode: str, tmp_path: Path) -> None:
    done = run(
        make(tmp_path / "c", mode, PUBLISHED[mode]),
        CHAT + "print(llm.engine.info().notes)\n",
        **SMALL,
        HABANA_STUB_PIN="refused",
    )
    assert done.returncode == 0 and f"tokens {TOKENS}" in done.stdout, done.stderr
    assert "pinned memory is refused" in done.stdout
