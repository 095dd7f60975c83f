"""Launches that start early touch nothing that an earlier one writes or reads before they wait, by what kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.oracles.layers.dependent_launches import DependentLaunch, recorded, unordered
from tests.oracles.layers.layer_cases import LayerCase, LayerRun
from trencadis.backends.cuda.kernels.layers import dependent_launch, fused_decode_attention
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.device.backend import Rotary

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def nothing():
    """A wait that is left out."""


ONE_ROW = LayerCase((5,), kv_heads=1, spare=0, hidden=64, inner=64)


def layers(device: torch.device, count: int = 2, case: LayerCase = ONE_ROW) -> list[DependentLaunch]:
    """The launches of layers of ``case`` that follow each other in one graph, in which no memory is used twice."""
    run = LayerRun(case, device)
    ops: Any = CudaOps()
    layer = run.layer(ops)
    layer.attention.bind(run.ready.cache)
    rotary = Rotary(run.ready.cos, run.ready.sin)

    def chain() -> None:
        x, residual = run.x, None
        for _ in range(count):
            x, residual = ops.layer(layer, x, residual, rotary, run.ready.tensors.attn)

    with pytest.MonkeyPatch.context() as patch:
        kept = keep_allocations(patch)
        found = recorded(chain)
    assert kept
    return found


def keep_allocations(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Keeps all new tensors alive in the list that is returned, so that an address stands for one tensor."""
    kept: list[Tensor] = []

    def keeping(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            kept.append(make(*args, **kwargs))
            return kept[-1]

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        patch.setattr(owner, name, keeping(getattr(owner, name)))
    return kept


def test_layers_are_ordered(device: torch.device) -> None:
    found = layers(device)
    assert [x.name for x in found[:6]] == [
        "skinny_kernel", "turned_items_kernel", "join_kernel", "skinny_kernel", "skinny_kernel", "skinny_kernel",
    ]  # fmt: skip
    assert len(found) == 12 and all(x.dependent and x.waits == x.programs for x in found)
    fetched = [x.early.all(False).size for x in found]
    assert all((size > 0) == (x.name == "skinny_kernel") for size, x in zip(fetched, found, strict=True)), "weights"
    assert unordered(found) == []


def test_a_layer_whose_attention_does_not_wait_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode_attention, "wait", nothing)
    said = "\n".join(unordered(layers(device, 1)))
    assert "turned_items_kernel: 3 programs never wait" in said
    assert "turned_items_kernel reads before its wait what skinny_kernel writes" in said
    assert "skinny_kernel reads behind its wait what" not in said, "the join between them waits"


@triton.jit
def planted_kernel(out, source, other, count, KIND: tl.constexpr, N: tl.constexpr):
    """out = source + 1, by two programs, with a mistake."""
    part = tl.program_id(0) * N + tl.arange(0, N)
    early = tl.zeros([N], tl.int32)
    if KIND == "reads early":
        early = tl.load(source + part)
    if KIND == "reads what is older early" or KIND == "tells early and reads what is older":
        early = tl.load(other + part)
    if KIND == "writes early":
        tl.store(out + part, early)
    if KIND == "counts early":
        tl.atomic_add(count, 1)
    if KIND == "tells early and reads what is older" or KIND == "tells early":
        dependent_launch.gdc_launch_dependents()  # type: ignore[attr-defined]
    if KIND == "ends early" and tl.program_id(0) == 0:
        return
    if KIND != "never waits":
        dependent_launch.wait()
    tl.store(out + part, tl.load(source + part) + 1 + early * 0)
    tl.atomic_add(count, 1)


def chain(device: torch.device, kinds: list[str], dependents: tuple[bool, ...] = (True,) * 4) -> list[DependentLaunch]:
    """Launch i reads what launch i - 1 wrote, and early, if at all, what launch i - 2 wrote; all count by one word, and
    write what launch i - 2 read."""
    held: list[Tensor] = [torch.zeros(8, dtype=torch.int32, device=device) for _ in range(2)]
    count = torch.zeros(1, dtype=torch.int32, device=device)

    def run() -> None:
        for i, (kind, early) in enumerate(zip(kinds, dependents, strict=False)):
            options = {"launch_pdl": True} if early else {}
            planted_kernel[(2,)](held[(i + 1) % 2], held[i % 2], held[(i + 1) % 2], count, KIND=kind, N=4, **options)

    return recorded(run)


GOOD = "waits first"


def test_a_chain_that_waits_is_ordered(device: torch.device) -> None:
    assert unordered(chain(device, [GOOD] * 4)) == []
    assert unordered(chain(device, [GOOD] * 4, (False, False, True, True))) == []


MISTAKES = {
    "reads early": "reads before its wait what planted_kernel writes",
    "writes early": "writes before its wait what planted_kernel",
    "counts early": "writes before its wait what planted_kernel writes",
    "ends early": "1 programs never wait",
    "never waits": "2 programs never wait",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_each_mistake_is_found(kind: str, device: torch.device) -> None:
    assert any(MISTAKES[kind] in line for line in unordered(chain(device, [GOOD, GOOD, kind, GOOD])))


def test_telling_the_next_one_before_the_wait_lets_it_run_beside_two(device: torch.device) -> None:
    """What the one before last wrote may be read early behind one that tells late, and only then."""
    late = chain(device, [GOOD, GOOD, GOOD, "reads what is older early"])
    early = chain(device, [GOOD, GOOD, "tells early", "reads what is older early"])
    assert [line for line in unordered(late) if "reads" in line.split("what")[0]] == []
    assert any("reads before its wait what planted_kernel writes" in line for line in unordered(early))
    assert unordered(chain(device, [GOOD, "tells early", GOOD])) == [], "which is no mistake by itself"


def test_one_that_never_waits_leaves_those_behind_it_unordered_with_those_ahead(device: torch.device) -> None:
    found = unordered(chain(device, [GOOD, "never waits", GOOD]))
    assert any("behind its wait" in line for line in found)
