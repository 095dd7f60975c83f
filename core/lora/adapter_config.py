"""Reads PEFT's ``adapter_config.json``: ranks and scales by module, and what else changes an answer. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.errors import StartupError

CONFIG = "adapter_config.json"
MOST_RANK = 4096
MOST_ALPHA = 1e6
LONGEST_PATTERN = 200
MOST_REPEATS = 3
"""Most quantifiers of a pattern, so that matching a module's name takes few steps."""

WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "velora_config",
})  # fmt: skip
"""Keys about training, or about which modules were trained: the names of the tensors say the same."""

REFUSED = {
    "use_dora": "DoRA scales the base's weights; merge the adapter with peft",
    "modules_to_save": "whole modules are replaced; merge the adapter with peft",
    "lora_bias": "biases of adapters are not implemented",
    "use_qalora": "QALoRA pools the inputs of a group; it is not implemented",
    "layer_replication": "layers that are used twice are not implemented",
    "trainable_token_indices": "embeddings of an adapter are not implemented; merge it with peft",
    "target_parameters": "adapters of experts are not implemented; merge the adapter with peft",
    "alora_invocation_tokens": "an adapter that starts at some tokens is not implemented",
    "arrow_config": "routed adapters are not implemented",
    "use_bdlora": "block-diagonal adapters are not implemented",
}
"""Keys whose value, unless empty, changes answers in a way that is not implemented -> what it means."""


@dataclass(frozen=True)
class AdapterConfig:
    """The part of an adapter's configuration that determines its weights.

    Args:
        rank, alpha: defaults of all modules.
        ranks, alphas: patterns of module names -> other values; the first match counts.
        root_scale: True if a module's scale is alpha / sqrt(rank) (rsLoRA), not alpha / rank.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root_scale: bool

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, by its name in the trained model."""
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of B times A for a module."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root_scale else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the configuration of the adapter in ``folder``.

    Raises:
        StartupError: it is missing or invalid, or asks for something that is not implemented; one line.
    """
    path = folder / CONFIG
    values = read_json(path)
    if values is None:
        raise StartupError(f"{folder} holds no LoRA adapter: it has no {CONFIG}")
    c = JsonFields(values, path)
    c.only("peft_type", ("LORA",), "LORA")
    c.only("bias", ("none",), "none")
    for key, why in REFUSED.items():
        if values.get(key):
            c.refuse(key, why)
    rank = c.integer("r", most=MOST_RANK)
    alpha = c.number("lora_alpha", 0, MOST_ALPHA, above=True)
    ranks, alphas = c.within("rank_pattern"), c.within("alpha_pattern")
    made = AdapterConfig(
        rank=rank,
        alpha=alpha,
        ranks={_check(ranks, key): ranks.integer(key, most=MOST_RANK) for key in ranks.values},
        alphas={_check(alphas, key): alphas.number(key, 0, MOST_ALPHA, above=True) for key in alphas.values},
        root_scale=c.boolean("use_rslora", False),
    )
    for key in sorted(c.unread() - WITHOUT_EFFECT - set(REFUSED)):
        if values[key]:
            c.refuse(key, "this key is not known, and may change answers")
    return made


def _check(c: JsonFields, pattern: str) -> str:
    """Returns ``pattern``; refuses one that is no regular expression, or one that may take long to match."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > LONGEST_PATTERN or repeats > MOST_REPEATS:
        c.refuse(pattern, f"implemented: patterns of {LONGEST_PATTERN} characters with {MOST_REPEATS} repetitions")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        c.refuse(pattern, "its key is no regular expression")
    return pattern


def _matches(pattern: str, module: str) -> bool:
    """Returns True if ``pattern`` matches a module's name, or its part after a dot."""
    return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module) is not None
