"""Another accelerator by the same door: the backend runs through its object, and nothing names ``torch.cuda``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes import cuda as fake_cuda
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends import cuda
from trencadis.backends.cuda.kernels import gpu_platform
from trencadis.backends.cuda.kernels.gpu_platform import Accelerator
from trencadis.core import devices
from trencadis.core.device.backend import Backend, BackendConfig

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


class Xpu(Accelerator):
    """Cards that torch has in ``torch.xpu``."""

    name, graph_type, internals, collectives = "xpu", "XPUGraph", "_xpu_", "xccl"

    def processors(self, device: torch.device) -> int:
        return int(self.module.get_device_properties(device).max_compute_units)

    def architecture(self, device: torch.device) -> int:
        return 0

    def lock_pages(self, address: int, size: int) -> Any:
        return None

    def raise_at_waits(self, on: bool) -> None:
        """Does nothing: the module has no such mode."""


def make_backend(cfg: BackendConfig) -> Backend:
    """With the two below, what a package for such cards has."""
    return cuda.make_backend(cfg, Xpu())


pick_policy, pick_dtype = cuda.pick_policy, cuda.pick_dtype


@pytest.fixture(autouse=True)
def nvidia() -> Iterator[None]:
    yield
    gpu_platform.use(Accelerator())


class Forbidden(ModuleType):
    """``torch.cuda`` where nothing may ask for it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} was asked for")


def test_only_the_accelerators_file_knows_torchs_module() -> None:
    """``support_checks`` checks NVIDIA cards alone; comments and messages may name it."""
    found = []
    for path in sorted((ROOT / "backends" / "cuda").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
            internal = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch._C._cuda")
            if named or internal:
                found.append(path.name)
    assert set(found) <= {"support_checks.py"}


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.PoolAccounting:
    """The stand-in of ``torch.cuda`` under another name, and ``torch.cuda`` forbidden."""
    made = fake_cuda.install(monkeypatch)
    fakes = {name: getattr(torch.cuda, name) for name in fake_cuda.CALLS}
    fakes["XPUGraph"] = fakes.pop("CUDAGraph")
    properties = SimpleNamespace(name="another card", max_compute_units=512)
    fakes |= {"get_device_properties": lambda d: properties, "mem_get_info": lambda d: (3, 4)}
    for name in ("endAllocateToPool", "releasePool", "hasPrimaryContext", "clearCublasWorkspaces"):
        monkeypatch.setattr(torch._C, f"_xpu_{name}", getattr(torch._C, f"_cuda_{name}"), raising=False)
        monkeypatch.delattr(torch._C, f"_cuda_{name}", raising=False)
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(**fakes), raising=False)
    monkeypatch.setattr(torch, "cuda", Forbidden("torch.cuda"))
    return made


def test_a_runtime_of_another_card_captures_and_replays(books: fake_cuda.PoolAccounting) -> None:
    gpu_platform.use(Xpu())
    runtime: Any = cuda.runtime_of(torch.device("xpu"))
    assert runtime.label == "xpu (another card)" and runtime.processors == 512 and runtime.device.type == "xpu"
    assert (runtime.memory.free(), runtime.memory.total()) == (3, 4)
    static, seen = torch.zeros(1), list[int]()

    def body(inputs: object) -> object:
        books.product()
        seen.append(1)
        return inputs

    def both() -> Any:
        runtime.launch("DECODE", lambda inputs: books.product(), None, static)
        return runtime.capture("DECODE", "DECODE(1)", body, "out", static)

    graph = runtime.on_captures(both)
    assert graph.out == "out" and len(seen) == 1
    runtime.replay(graph)
    runtime.release(graph)
    assert not any(books.uses.values()) and len(seen) == 1
    with runtime.hooks.no_sync():
        pass


def test_the_twin_serves_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of its own, as far as the engine sees: three functions, and an accelerator."""
    offered: Any = SimpleNamespace(name="xpu", module=__name__, load=lambda: make_backend)
    monkeypatch.setattr(devices, "entry_points", lambda group="": [offered])
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    flags: dict[str, Any] = dict(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=128, dtype="float32")
    chat: Any = [{"role": "user", "content": "How many circles are there?"}]
    answers = []
    for device in ("xpu", "cpu"):
        llm = LLM(str(demo_path()), device=device, **({**flags, "warmup": "skip"} if device == "xpu" else flags))
        answers.append(llm.chat(chat, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids)
        if device == "xpu":
            info = llm.engine.info()
            assert info.device == "xpu (twin)" and any(note.startswith("xpu (twin): no card") for note in info.notes)
        llm.close()
    assert answers[0] == answers[1] and len(answers[0]) == 8
