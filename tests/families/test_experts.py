"""Experts: the CPU's, the same bits in any company, the emulated card's; what checkpoints may say of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.text_checkpoints import FORMS, set_keys
from trencadis.backends.conformance import op_checks_layers
from trencadis.backends.conformance.backend_under_test import make_target
from trencadis.backends.conformance.check_model.checkpoint_checks import CheckedModel, run
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.expert_mlp import route_tokens
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig, SigmoidRouting
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.errors import StartupError
from trencadis.core.memory.weight_bytes import decoder_values
from trencadis.core.models.moe import SigmoidRouter, mark_best
from trencadis.core.shapes.launch_costs import costs_of, layers_values

HIDDEN, INNER, COUNT, TOP = 40, 24, 8, 3


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu, "relu": torch.relu, "relu2": lambda x: x * x * (x > 0),
}  # fmt: skip


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(ops: Any, dtype: torch.dtype = torch.float32, first: int = 0) -> Any:
    """``first``: the first row of gates and ups; INNER: there are no gates."""
    gate_up = [normal(2 * INNER, HIDDEN, seed=i, dtype=dtype)[first:] / 6 for i in range(COUNT)]
    return ops.pack_experts(gate_up, [normal(HIDDEN, INNER, seed=50 + i, dtype=dtype) / 5 for i in range(COUNT)])


def recompute(x: Tensor, scores: Tensor, normalise: bool, kind: str, plain: bool) -> Tensor:
    """Token by token, in float64."""
    act = ACTIVATIONS[kind]
    rows = []
    for token, score in zip(x.double(), scores.double(), strict=True):
        shares = score.softmax(0)
        best = shares.argsort(descending=True)[:TOP]
        total = shares[best].sum() if normalise else 1.0
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in best.tolist():
            gate, up = (normal(2 * INNER, HIDDEN, seed=e).double() / 6 @ token).chunk(2)
            made = act(up) if plain else act(gate) * up
            row += shares[e] / total * (normal(HIDDEN, INNER, seed=50 + e).double() / 5 @ made)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps(), InvariantOps()], ids=["reference", "fast", "invariant"])
@pytest.mark.parametrize(("normalise", "kind", "plain"), [
    (True, "silu", False), (False, "relu", False), (True, "relu2", True), (False, "silu", True),
])  # fmt: skip
def test_a_token_is_the_sum_over_its_best_experts(
    ops: Any, normalise: bool, kind: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the product over all experts takes them a few at a time."""
    monkeypatch.setattr("trencadis.backends.cpu.expert_mlp.ROWS", 70)
    w = packed(ops, first=INNER * plain)
    for n in (1, 2, 33):
        x, scores = normal(n, HIDDEN, seed=n), normal(n, COUNT, seed=n + 1)
        got = ops.experts(x.clone(), scores, w, TOP, normalise, kind)
        torch.testing.assert_close(got.double(), recompute(x, scores, normalise, kind, plain), rtol=1e-5, atol=1e-5)


def test_a_router_of_sigmoids_gives_the_weights_of_its_definition() -> None:
    """The choice by sums of sigmoid and correction within the best groups; weights without the correction."""
    count, top, scale, x = 8, 3, 2.5, 3 * normal(20, HIDDEN, seed=1)
    for groups, top_groups, normalise in ((1, 1, True), (4, 2, True), (4, 2, False), (2, 2, False)):
        c = ExpertsConfig(count, top, INNER, normalise, sigmoid=SigmoidRouting(scale, groups, top_groups))
        assert c.sigmoid is not None
        router = SigmoidRouter(c, c.sigmoid)
        router.weight, router.correction = normal(count, HIDDEN, seed=2) / 6, normal(count, seed=3)
        scores, factor = router(x)
        shares, chosen = route_tokens(scores, top, True)
        for i, token in enumerate(x):
            weights = (router.weight.double() @ token.double()).sigmoid()
            choice = (weights + router.correction).view(groups, -1)
            best = choice.topk(2).values.sum(-1).topk(top_groups).indices.tolist()
            left = [g * count // groups + j for g in best for j in range(count // groups)]
            want = sorted(left, key=lambda e: -float(choice.flatten()[e]))[:top]
            assert sorted(chosen[i].tolist()) == sorted(want)
            total = weights[want].sum() if normalise else 1.0
            found = (shares[i] * factor[i]).double()
            torch.testing.assert_close(found, scale * weights[chosen[i]] / total, rtol=1e-5, atol=1e-7)


def test_a_router_of_sigmoids_takes_the_lowest_of_equal_experts() -> None:
    """Also of groups, and beside better ones: as softmax routing does on every device."""
    count, top = 128, 6
    for groups, top_groups, best, want in (
        (1, 1, [], [0, 1, 2, 3, 4, 5]), (1, 1, [9, 70], [0, 1, 2, 3, 9, 70]), (8, 2, [], [0, 1, 2, 3, 4, 5]),
        (8, 2, [40, 100], [32, 33, 34, 35, 40, 100]),
    ):  # fmt: skip
        c = ExpertsConfig(count, top, INNER, True, sigmoid=SigmoidRouting(1.0, groups, top_groups))
        assert c.sigmoid is not None
        router = SigmoidRouter(c, c.sigmoid)
        router.weight, router.correction = torch.zeros(count, HIDDEN), torch.zeros(count)
        router.correction[best] = 1.0
        scores, _ = router(normal(3, HIDDEN))
        taken = (scores > -1e29).nonzero().view(3, -1, 2)[:, :, 1].tolist()
        assert taken == [want] * 3, (groups, best)


def test_the_best_are_those_of_a_stable_sort() -> None:
    nan = float("nan")
    for count in (1, 3, 8):
        scores = torch.cat([normal(50, 8).round(), torch.tensor([[nan, 1, nan, 2, nan, nan, 0, 0], [nan] * 8])])
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(mark_best(scores, count), torch.zeros(52, 8).scatter(1, order, 1.0) > 0)


def test_an_expert_that_nobody_chose_may_overflow() -> None:
    ops, scores = ReferenceOps(), torch.tensor([[1.0, 0.0, -90.0]])
    gate_up = [torch.ones(4, 8), torch.ones(4, 8), torch.full((4, 8), 1e30)]
    w = ops.pack_experts(gate_up, [torch.ones(8, 2)] * 3)
    assert ops.experts(torch.full((1, 8), 1e9), scores, w, 2, True, "silu").isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    ops = InvariantOps()
    w, x, scores = packed(ops, dtype), normal(300, HIDDEN, dtype=dtype), normal(300, COUNT, seed=3, dtype=dtype)
    whole = ops.experts(x.clone(), scores, w, TOP, True, "silu")
    for begin, end in ((0, 1), (5, 6), (3, 40), (100, 300)):
        assert torch.equal(ops.experts(x[begin:end].clone(), scores[begin:end], w, TOP, True, "silu"), whole[begin:end])


def test_decoding_rows_read_their_own_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, read = CpuOps(), list[int]()
    w = packed(ops)
    kept = ops.linear

    def note(x: Tensor, weight: Any) -> Tensor:
        read.append(id(weight))
        return kept(x, weight)

    monkeypatch.setattr(ops, "linear", note)
    scores = torch.full((2, COUNT), -9.0).scatter(1, torch.tensor([[1, 2, 6], [2, 6, 7]]), 1.0)
    ops.experts(normal(2, HIDDEN), scores, w, TOP, True, "silu")
    assert set(read) == {id(some[e]) for e in (1, 2, 6, 7) for some in (w.gate_up, w.down)} and len(read) == 8


@pytest.mark.parametrize("lazy", ["1", "0"])
def test_the_emulated_cards_pass_the_check(monkeypatch: Any, vl_checkpoint: Any, lazy: str) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    assert op_checks_layers.experts(make_target("hpu", vl_checkpoint, quick=True)).startswith("error at most")


@pytest.fixture
def copied(form: Any, tmp_path: Path) -> Any:
    return lambda family, name: Path(shutil.copytree(form(family, name), tmp_path / family))


def test_the_number_of_experts_has_two_names(copied: Any) -> None:
    path = copied("qwen3_moe", "plain")
    raw = json.loads((path / "config.json").read_text())
    assert load_config(path).text.experts.count == 8  # type: ignore[union-attr]
    count = raw.pop("num_local_experts", None) or raw.pop("num_experts")
    (path / "config.json").write_text(json.dumps({**raw, "num_experts": count}))
    assert load_config(path).text.experts.count == 8  # type: ignore[union-attr]
    set_keys(path, num_experts_per_tok=9)
    with pytest.raises(StartupError, match="num_experts_per_tok is 9; it must be at most num_experts, which is 8"):
        load_config(path)


@pytest.mark.parametrize(("family", "name"), [
    *((family, next(iter(FORMS[family]))) for family in ("mixtral", "qwen3_moe", "phi3")),
    ("nemotron_h", "a part a layer, two groups"), ("nemotron_h", "experts of 32 values, weights as they are"),
])  # fmt: skip
def test_every_key_that_transformers_has_is_read(form: Any, family: str, name: str) -> None:
    path = form(family, name)
    (found,) = run(CheckedModel(path, path), ("config",)).results
    assert found.status == "pass", found.reason


def test_layers_without_experts_are_those_that_are_named_or_skipped(copied: Any) -> None:
    path = copied("qwen3_moe", "plain")
    for values, dense in (
        ({"decoder_sparse_step": 2}, (0,)), ({"mlp_only_layers": [1]}, (1,)), ({"mlp_only_layers": []}, ()),
    ):  # fmt: skip
        set_keys(path, **{"decoder_sparse_step": 1, "mlp_only_layers": None, **values})
        assert load_config(path).text.experts.dense == dense  # type: ignore[union-attr]
    set_keys(path, decoder_sparse_step=9)
    assert load_config(path).text.experts is None


def test_a_missing_or_misshaped_expert_is_named(copied: Any) -> None:
    from trencadis.backends.cpu import make_backend
    from trencadis.core.device.backend import BackendConfig
    from trencadis.core.models.model_loader import load_model

    path = copied("mixtral", "names of transformers 5, wide heads")
    held = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    whole = held[name]
    for wrong, said in ((whole[:-1], "lacks the weight layers.1.mlp.experts.4.down_proj"),
                        (whole[:, :-1], "layers.1.mlp.experts.0.down_proj.weight has shape")):  # fmt: skip
        save_file({**held, name: wrong.contiguous()}, path / "model.safetensors")
        with pytest.raises(StartupError, match=said):
            load_model(load_config(path), make_backend(BackendConfig(options={"threads": "1"})))
    assert len(list(open_weights(path))) == len(held)


def test_costs_count_the_experts_that_a_token_takes(form: Any) -> None:
    """Work follows from a token's own experts, memory and a launch's reading from all of them."""
    config = load_config(form("mixtral", "plain"))
    t = config.text
    expert = 3 * 64 * 96
    assert layers_values(t, active=False) - layers_values(t) == t.layers * 2 * expert
    assert decoder_values(config, 1) - decoder_values(config, 2) > t.layers * 4 * expert // 2
    assert costs_of(config, 16, 100.0).launch == pytest.approx(100 * layers_values(t, active=False) / layers_values(t))
