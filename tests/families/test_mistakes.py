"""A mistake in what a family says of itself is found by the comparison of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.text_checkpoints import LONGROPE
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig, QueryGrowth, SigmoidRouting
from trencadis.core.checkpoint.model_config import LAYER, PRE, RMS, RMS_ONE, ModelConfig
from trencadis.core.checkpoint.rope_config import LongScaling

LONG_FORM = "long from 64 tokens on"
SHORT, FAR = (tuple(LONGROPE[name]) for name in ("short_factor", "long_factor"))
MAGNITUDE = (1 + math.log(512 / 64) / math.log(64)) ** 0.5
GEMMA = "windows of 8, four layers"
OSS = "windows of 20 in every second layer"
SMOLLM = "every second layer without positions"
SIGMOIDS = "experts, two of four groups, a shared one"
NEMOTRON_EXPERTS = ExpertsConfig(
    8, 3, 48, True, (0, 2, 4), shared=80, shared_name=".shared_experts", plain=True, sigmoid=SigmoidRouting(1.0, 4, 2)
)
MISTAKES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "window off by one": ("gemma3", GEMMA, {"window": 9}),
    "every layer has a window": ("gemma3", GEMMA, {"full_layers": ()}),
    "one table for all layers": ("gemma3", GEMMA, {"local_theta": 0.0}),
    "weights not above one": ("gemma3", GEMMA, {"norm": RMS}),
    "no norms behind": ("gemma3", GEMMA, {"norm_placement": PRE}),
    "embeddings unscaled": ("gemma3", GEMMA, {"embedding_scale": 1.0}),
    "scale by the head's size": ("gemma3", GEMMA, {"scale": 0.0}),
    "gelu without its tanh in Gemma": ("gemma3", GEMMA, {"activation": "gelu"}),
    "window forgotten": ("mistral", "window of 20", {"window": 0}),
    "window of one key less": ("mistral", "window of 20", {"window": 19}),
    "window in the first layer": ("qwen3", "window in the second layer", {"full_layers": (1,)}),
    "norms of q and k dropped": ("qwen3", "plain", {"qk_norm": False}),
    "YaRN's magnitude dropped": ("qwen3", "biases, yarn", {"scale": 0.0}),
    "YaRN's table dropped": ("qwen3", "biases, yarn", {"rope_scaling": None}),
    "another activation": ("mistral", "no window", {"activation": "gelu"}),
    "linear scaling dropped": ("mistral", "tied, linear", {"rope_scaling": None}),
    "another base": ("mistral", "no window", {"rope_theta": 1.1e4}),
    "the whole head turned": ("phi3", "half of a head turns", {"rotary_dim": 0}),
    "short factors for a long request": ("phi3", LONG_FORM, {"rope_scaling": LongScaling(SHORT, SHORT, 64, MAGNITUDE)}),
    "long factors one token late": ("phi3", LONG_FORM, {"rope_scaling": LongScaling(SHORT, FAR, 90, MAGNITUDE)}),
    "LongRoPE's magnitude dropped": ("phi3", LONG_FORM, {"rope_scaling": LongScaling(SHORT, FAR, 64, 1.0)}),
    "shares as they are": ("mixtral", "plain", {"experts": ExpertsConfig(4, 2, 96, False)}),
    "one expert a token": ("mixtral", "plain", {"experts": ExpertsConfig(4, 1, 96, True)}),
    "gelu between experts": ("mixtral", "plain", {"activation": "gelu"}),
    "shares divided by their sum": (
        "qwen3_moe",
        "shares as they are, every second layer",
        {"experts": ExpertsConfig(8, 3, 48, True, (0, 2))},
    ),
    "an expert too many": ("qwen3_moe", "plain", {"experts": ExpertsConfig(8, 4, 48, True)}),
    "norms of q and k dropped beside experts": ("qwen3_moe", "plain", {"qk_norm": False}),
    "sinks dropped": ("gpt_oss", OSS, {"sinks": False}),
    "biases of experts dropped": ("gpt_oss", OSS, {"experts": ExpertsConfig(4, 2, 96, True)}),
    "silu in gpt-oss": ("gpt_oss", OSS, {"activation": "silu"}),
    "windows in the other layers": ("gpt_oss", OSS, {"full_layers": (0, 2)}),
    "shared expert without its gate": ("qwen2_moe", "plain", {"experts": ExpertsConfig(8, 3, 48, False, shared=80)}),
    "shared expert dropped": ("qwen2_moe", "plain", {"experts": ExpertsConfig(8, 3, 48, False)}),
    "pairs half a head apart": ("glm4", "half of a head", {"adjacent_pairs": False}),
    "the whole head of GLM-4 rotated": ("glm4", "whole heads, no biases", {"rotary_dim": 8}),
    "positions in every layer": ("smollm3", SMOLLM, {"unrotated_layers": ()}),
    "another layer without positions": ("smollm3", SMOLLM, {"unrotated_layers": (0, 3)}),
    "queries that do not grow": ("ministral3", "grows from 20", {"query_growth": None}),
    "queries that grow one token late": ("ministral3", "grows from 20", {"query_growth": QueryGrowth(0.3, 21)}),
    "residuals unscaled": ("granite", "plain", {"residual_scale": 1.0}),
    "logits unscaled": ("granite", "plain", {"logit_scale": 1.0}),
    "bias of the output dropped": ("seed_oss", "all biases, one KV head, wide heads", {"out_bias": False}),
    "norms before attention": ("olmo2", "plain", {"norm_placement": PRE}),
    "scaled positions in windows": ("olmo3", "yarn in the fourth layer", {"local_theta": 0.0}),
    "relu not squared": ("nemotron_h", "a part a layer, two groups", {"activation": "relu"}),
    "experts of sigmoids unscaled": ("nemotron_h", SIGMOIDS, {"experts": NEMOTRON_EXPERTS}),
    "experts of all groups": (
        "nemotron_h",
        SIGMOIDS,
        {"experts": replace(NEMOTRON_EXPERTS, sigmoid=SigmoidRouting(2.5, 4, 4))},
    ),
    "offset 0": ("opt", "125m", {"position_offset": 0}),
    "gelu for relu": ("opt", "125m", {"activation": "gelu"}),
    "norms before": ("opt", "350m", {"norm_placement": PRE}),
    "biases dropped": ("opt", "125m", {"mlp_bias": False}),
    "gelu without its tanh": ("gpt2", "tied", {"activation": "gelu"}),
    "scores scaled": ("gpt2", "untied, unscaled", {"scale": 0.0}),
    "another epsilon": ("gpt2", "untied, unscaled", {"eps": 1e-5}),
    "rotary besides": ("gpt2", "tied", {"rotary": True, "rope_theta": 1e4}),
    "the mean left in": ("gpt2", "tied", {"norm": RMS}),
}


def off(harness: HandDrivenModel, want: torch.Tensor, ids: list[int]) -> float:
    """The largest error of the logits, as a share of the largest."""
    return float((harness.prefill(ids, 90) - want).abs().max() / want.abs().max())


@pytest.fixture
def compared(form: Any, oracle: Any) -> Callable[..., float]:
    ids = np.random.default_rng(0).integers(0, 300, 90).tolist()

    def compare(family: str, name: str, change: Callable[[ModelConfig], ModelConfig]) -> float:
        path = form(family, name)
        with torch.no_grad():
            want = oracle(path)(input_ids=torch.tensor([ids])).logits[0]
        return off(HandDrivenModel(path, change=change), want, ids)

    return compare


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(compared: Any, mistake: str) -> None:
    family, name, wrong = MISTAKES[mistake]

    def change(config: ModelConfig) -> ModelConfig:
        text = replace(config.text, **wrong)
        assert text != config.text and text.norm in (RMS, RMS_ONE, LAYER)
        return replace(config, text=text)

    assert compared(family, name, change) > 1e-4


def test_a_matrix_that_is_not_transposed_shows(compared: Any, monkeypatch: Any) -> None:
    """Square ones have the right shape either way."""
    family = model_registry.family_of("GPT2LMHeadModel")
    square = tuple(name for name in family.names.transposed if name != "o_proj")
    wrong = replace(family, names=replace(family.names, transposed=square))
    monkeypatch.setattr("trencadis.core.models.decoder.family_of", lambda architecture: wrong)
    assert compared("gpt2", "tied", lambda config: config) > 1e-4
