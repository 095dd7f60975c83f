"""``plan --time`` for a Gaudi: the reference's column, ours beside it, and experts that one row reads."""

from __future__ import annotations

import dataclasses

import pytest

from tests.traffic.launch_lines import MODELS, model_of
from trencadis.backends.hpu import decode_step_time_estimate
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig, RecurrentConfig
from trencadis.core.checkpoint.model_config import PLAIN
from trencadis.core.errors import StartupError
from trencadis.core.shapes.launch_costs import layers_values
from trencadis.server.plan.plan_command import main as plan

pytestmark = pytest.mark.part("gaudi")

REFERENCE = {
    (1, 32, 1024): 4.0, (1, 32, 4096): 8.4, (1, 32, 8192): 14.4, (2, 32, 4096): 15, (2, 128, 4096): 43,
}  # fmt: skip
"""Model (of MODELS), rows and context -> milliseconds of a step on a Gaudi 2 with the reference's gather, on paper."""


def test_ours_stands_beside_the_references_column() -> None:
    for (number, rows, context), wanted in REFERENCE.items():
        report = decode_step_time_estimate.times(model_of(*MODELS[number]), rows=(rows,), contexts=(context,))
        (load,) = report["loads"]
        assert load["reference"] * 1e3 == pytest.approx(wanted, rel=0.02)
        assert load["reference"] <= load["tpot"] <= 1.15 * load["reference"], (number, rows, context)


def test_one_row_is_bound_by_weights_and_not_by_the_host() -> None:
    (load,) = decode_step_time_estimate.times(model_of(*MODELS[1]), rows=(1,), contexts=(1024,))["loads"]
    assert load["host"] < load["device"] and load["limit"] == "reading weights"


def test_one_row_reads_its_own_experts_alone() -> None:
    """Qwen3-30B-A3B: bytes a token at most 1.3 times those of active weights."""
    base = model_of(2048, 48, 32, 4, 6144, False)
    experts = ExpertsConfig(128, 8, 768, True)
    model = dataclasses.replace(base, text=dataclasses.replace(base.text, experts=experts))
    active = 2 * (layers_values(model.text) + model.text.vocab * model.text.hidden)
    assert active * 0.9 < decode_step_time_estimate.weight_bytes(model, 1) <= 1.3 * active
    dense = 2 * (layers_values(model.text, active=False) + model.text.vocab * model.text.hidden)
    assert decode_step_time_estimate.weight_bytes(model, 1000) == pytest.approx(dense, rel=0.05)


def test_layers_of_one_part_are_counted_as_what_they_are() -> None:
    """Two state spaces, an MLP and attention: weights, keys of one layer, states that are read and written."""
    base = model_of(2048, 4, 32, 4, 6144, False)
    state = RecurrentConfig((0, 2), 4, key_heads=8, value_heads=64, key_dim=128, value_dim=64, scan=True)
    text = dataclasses.replace(base.text, mlp=PLAIN, recurrent=state, mlp_layers=(1,))
    model = dataclasses.replace(base, text=text)
    assert decode_step_time_estimate.weight_bytes(model, 1) == 2 * (layers_values(text) + text.vocab * text.hidden)
    assert decode_step_time_estimate.kv_bytes(model, 1, 4096) == decode_step_time_estimate.kv_bytes(base, 1, 4096) / 4
    assert decode_step_time_estimate.state_bytes(model, 3) == 3 * 2 * 2 * state.slot_bytes(2)
    assert not decode_step_time_estimate.state_bytes(base, 3)
    assert decode_step_time_estimate.times(model)["loads"][0]["tpot"] > 0


def test_plan_prints_the_times_of_a_gaudi(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--device", "hpu", "--memory", "90GiB", "--time", "--card", "gaudi3"]) == 0
    reported = capsys.readouterr().out
    assert "decoding on Gaudi 3" in reported and "reference ms" in reported and "sources:" in reported
    with pytest.raises(StartupError, match="gaudi2, gaudi3, not of gaudi9"):
        decode_step_time_estimate.times(model_of(*MODELS[1]), name="gaudi9")
