"""A lack of memory by every text of the plug-in, at once and late, in each mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hpu.start.test_container import CHAT_OR_LINE, SMALL, TOKENS, run
from tests.stubs.gaudi_container import PUBLISHED, make
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.habana_bridge import is_out_of_memory
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import HeadTensorsOut, OutOfDeviceMemory, TextTensors

pytestmark = pytest.mark.part("gaudi")

WORKSPACE = "[Rank:0] FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size ::12884901888 failed!"


@pytest.mark.parametrize("text", [
    WORKSPACE,
    f"FATAL ERROR :: MODULE:PT_BRIDGE Exception in Launch thread...\nCheck $HABANA_LOGS/ for details{WORKSPACE}",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB",
    "FATAL ERROR :: MODULE:PT_DEVMEM OOM: No enough memory for defragment.",
    "FATAL ERROR :: MODULE:PT_DEVMEM destination_pointer_ allocation failed during defragmentation",
    "synStatus=4 [synOutOfDeviceMemory]. Device allocation failed.",
    "HCCL: out of memory",
])  # fmt: skip
def test_a_text_is_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text)) and not is_out_of_memory(RuntimeError("Graph compile failed."))


def double(x: TextTensors) -> HeadTensorsOut:
    tokens: Tensor = x.tokens * 2
    return HeadTensorsOut(tokens, None, None, None, None)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["oom", "late"])
def test_a_launch_that_lacks_its_workspace_fails_in_its_place(hpu: Any, lazy: bool, kind: str) -> None:
    """Also where the error is one of the thread that launches recipes, which a later call raises."""
    backend = hpu(lazy=lazy, block_size=4, faults=f"{kind}@step:1")
    program = backend.program(Bucket(Stage.DECODE, (2, 2)), double)
    with pytest.raises(OutOfDeviceMemory, match="workspace Allocation of size ::"):
        program.run()
    assert backend.fetch(program.run(), 2).result().token.tolist() == [0, 0]


def test_a_late_error_behind_the_first_launch_is_named_too(hpu: Any) -> None:
    backend = hpu(lazy=True, block_size=4, faults="late@step:3")
    program = backend.program(Bucket(Stage.DECODE, (2, 2)), double)
    program.run()
    program.capture()
    program.replay()
    out = program.replay()
    with pytest.raises(OutOfDeviceMemory, match="workspace"):
        backend.fetch(out, 2).result()


def test_tensors_and_workspaces_have_texts_of_their_own(hpu: Any) -> None:
    backend = hpu(computes=False)
    free = backend.memory.free()
    with pytest.raises(RuntimeError, match="Allocation failed for size::"):
        torch.empty(free + 128, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match="workspace Allocation of size ::"):
        backend.card.allocator.grow_workspace(free + 128)


@pytest.mark.long
@pytest.mark.parametrize("torch_version", ["2.9.0+hpu_1.23.1-25.git8598e6d", "2.13.0+cpu"])
@pytest.mark.parametrize("number", ["3", "late:3", "9", "late:9"])
def test_a_start_that_lacks_memory_once_answers_or_is_one_line(torch_version: str, number: str, tmp_path: Path) -> None:
    container = make(tmp_path / "c", torch_version, PUBLISHED[torch_version])
    done = run(container, CHAT_OR_LINE, **SMALL, HABANA_STUB_OOM=number)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    (line,) = [text for text in done.stdout.splitlines() if text.startswith(("tokens", "line"))]
    assert line == f"tokens {TOKENS}" or "workspace Allocation" in line
