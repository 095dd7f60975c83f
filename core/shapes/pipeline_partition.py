"""Divides a decoder's layers among pipeline stages. Pure and torch-free.

The cost of a stage is the number of weights applied to a token there, since a step of few tokens reads them once and a
step of many multiplies by each: those of its layers, plus the tower's on the first stage and the head's on the last.
The embedding costs no time. Among all divisions the one with the smallest sum of squares is taken, which avoids a stage
far above the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from trencadis.core.checkpoint.model_config import GATED, ModelConfig, StageShare, TextConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.device_shape_policy import Policy
from trencadis.core.errors import StartupError

PARTITION = "VLLM_PP_LAYER_PARTITION"


def layer_values(t: TextConfig) -> list[int]:
    """Returns the number of weights of each layer that are applied to one token, without norms and biases."""
    recurrent = 0 if t.recurrent is None else t.recurrent.values(t.hidden)
    mixing = [
        (recurrent if i in t.recurrent_layers else t.of_layer(i).attention_values) * t.mixes_tokens(i)
        for i in range(t.layers)
    ]
    dense = [(3 if t.mlp == GATED else 2) * t.hidden * t.of_layer(i).intermediate for i in range(t.layers)]
    if t.experts is None:
        return [own + dense[i] * t.has_mlp(i) + t.layer_input_values for i, own in enumerate(mixing)]
    some = t.experts.values(t.hidden, only=t.experts.top) + t.experts.shared_values(t.hidden)
    return [own + dense[i] * t.has_mlp(i) + some * t.has_experts(i) for i, own in enumerate(mixing)]


def divide_layers(layers: Sequence[int], first: int, last: int, stages: int) -> tuple[int, ...]:
    """Returns how many of ``layers`` each stage gets, at least one.

    Args:
        layers: the cost of each layer. first, last: additional cost of the first and of the last stage.
    """
    sums = [0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> int:
        own = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        return (sums[stop] - sums[start] + own) ** 2

    @cache
    def best(stage: int, start: int) -> tuple[int, int]:
        """Returns (smallest sum of squares from ``stage`` on, end of ``stage``)."""
        if stage == stages - 1:
            return cost_of(stage, start, len(layers)), len(layers)
        ends = range(start + 1, len(layers) - (stages - 2 - stage))
        return min((cost_of(stage, start, end) + best(stage + 1, end)[0], end) for end in ends)

    counts, start = [], 0
    for stage in range(stages):
        end = best(stage, start)[1]
        counts.append(end - start)
        start = end
    return tuple(counts)


def requested_partition(text: str, layers: int, stages: int) -> tuple[int, ...] | None:
    """Parses ``EngineConfig.pipeline_layer_partition``: the number of layers of each stage; None: it is not set.

    Raises:
        StartupError: it is not a list of ``stages`` positive numbers that sum to ``layers``.
    """
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    counts = tuple(int(word) for word in words if word.isdecimal() and len(word) < 7)
    even = ",".join(map(str, divide_layers([1] * layers, 0, 0, stages)))
    if len(counts) != len(words) or min(counts) < 1:
        raise StartupError(f"{PARTITION}={text[:80]} is no list of layers a stage, each above 0; {even} would fit.")
    if len(counts) != stages or sum(counts) != layers:
        raise StartupError(
            f"{PARTITION}={text[:80]} puts {sum(counts)} layers on {len(counts)} stages; the model has {layers} layers "
            f"and --pipeline-parallel-size is {stages}: {even} would fit."
        )
    return counts


def split_model(model: ModelConfig, stages: int, partition: str = "") -> tuple[ModelConfig, ...]:
    """Returns the model with the share of each of ``stages``; the model itself if there is only one.

    Raises:
        StartupError: it cannot be divided so; the message names an alternative.
    """
    if stages == 1:
        return (model,)
    t, family = model.text, family_of(model.architecture)
    if family.values is not None or family.weights is not None:
        raise StartupError(
            f"--pipeline-parallel-size {stages}: {model.architecture} has layers of its own, which are not divided; "
            "--tensor-parallel-size shares them"
        )
    if stages > t.layers:
        raise StartupError(
            f"--pipeline-parallel-size {stages} is more than the {t.layers} layers of {model.name}; "
            f"at most {t.layers} fit, each with one layer."
        )
    counts = requested_partition(partition, t.layers, stages)
    if counts is None:
        tower = 0 if model.vision is None else int(model.vision.slot_weights())
        head = t.vocab * t.width if model.pooling is None else 0
        counts = divide_layers(layer_values(t), tower, head, stages)
    made, first = [], 0
    for stage, count in enumerate(counts):
        made.append(replace(model, part=StageShare(first, first + count, stage, stages)))
        first += count
    return tuple(made)


def check_ranks(model: ModelConfig, device: str, policy: Policy) -> None:
    """Raises StartupError if a device cannot transfer rows between stages, or gather image rows, as the model
    requires.
    """
    if model.encoder_data_parallel and not policy.encoder_data_parallel:
        raise StartupError(
            f"--mm-encoder-tp-mode data: ranks of the {device} backend gather no rows of images; leave it out, they "
            "share the tower's weights, --device cpu does it"
        )
    stages = model.share.stages
    if stages > 1 and not policy.stages:
        raise StartupError(
            f"--pipeline-parallel-size {stages}: the {device} backend passes no rows between stages; "
            "--tensor-parallel-size shares layers, --device cpu has stages"
        )
