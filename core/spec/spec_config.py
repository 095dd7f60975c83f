"""The settings of speculation, and how they are read from ``--speculative-config`` or ``--spec-*``. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trencadis.core.engine_config import DRAFT_MODELS, EngineConfig
from trencadis.core.errors import StartupError, suggest_name

if TYPE_CHECKING:
    from trencadis.core.checkpoint.model_config import ModelConfig
    from trencadis.core.device_shape_policy import Policy

SHORTEST, LONGEST = 2, 4
"""Default lengths in ids of the suffixes that are looked up."""

TEXTS = ("ngram", "suffix")
"""Sources of drafts that need no model."""

DRAFT_MODEL = "draft_model"
"""Drafts come from a smaller model of the same tokenizer."""

EAGLE3 = "eagle3"
"""Drafts come from a head over hidden states of the target model."""

METHODS = (*TEXTS, DRAFT_MODEL, EAGLE3)

MOST_DRAFTS = 16
"""Largest number of drafts of a sequence in one step."""

DEFAULT_DRAFTS = 4
DEFAULT_ROWS = 4
"""Largest number of running sequences that are drafted where nothing is asked for."""

FORCED_IDS = 32
"""Most ids that a step takes from masks that hold one id alone."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How sequences are drafted.

    Args:
        method: source of drafts, one of ``METHODS``; empty: only predictions of requests are drafted.
        drafts: most drafts of a sequence in one step.
        shortest, longest: lengths in ids of the suffixes that are looked up.
        rows: with more running sequences nothing is drafted; 0: no bound.
        always: draft whatever it costs, for tests.
        skipped: ids that are never drafted (placeholders of images).
        model: folder of the model or head that drafts; empty: none does.
        forced: most ids that a step takes from masks that hold one id alone; 0: none.
    """

    method: str = "ngram"
    drafts: int = DEFAULT_DRAFTS
    shortest: int = SHORTEST
    longest: int = LONGEST
    rows: int = 0
    always: bool = False
    skipped: frozenset[int] = frozenset()
    forced: int = FORCED_IDS
    model: str = ""


FLAG = "--speculative-config"
LONGEST_LOOKUP = 16
"""Largest ``prompt_lookup_max``, in ids."""

LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
COUNTS = {
    "num_speculative_tokens": MOST_DRAFTS,
    **dict.fromkeys(LOOKUP, LONGEST_LOOKUP),
    "disable_by_batch_size": 65536,
}
"""Whole numbers of the configuration -> the largest value."""

KEYS = ("method", "model", *COUNTS)

NO_EFFECT: Mapping[str, str] = {
    "suffix_decoding_max_tree_depth": "suffixes have the lengths of prompt_lookup_min to prompt_lookup_max",
    "suffix_decoding_max_cached_requests": "counts of recent answers are bounded in bytes",
    "suffix_decoding_max_spec_factor": "how many drafts pay is measured",
    "suffix_decoding_min_token_prob": "how many drafts pay is measured",
    "max_model_len": "drafts are made at any length",
    "enforce_eager": "a draft has graphs where its target has them",
    "draft_tensor_parallel_size": "a draft model runs beside one rank",
    "disable_padded_drafter_batch": "a draft's batches are padded where its target's are",
    "rejection_sample_method": "a draft is accepted where it equals what is sampled without drafts",
}
"""Keys of vLLM's configuration that change no answer here, with the reason."""


def list_ignored_keys(config: EngineConfig) -> list[str]:
    """Returns a note for each key of ``--speculative-config`` that has no effect."""
    given = config.speculative_config
    return [f"{FLAG}.{key} has no effect: {NO_EFFECT[key]}." for key in given if key in NO_EFFECT]


def requested_speculation(config: EngineConfig) -> SpeculationConfig | None:
    """Returns what the flags ask for; None: nothing is asked for.

    Raises:
        StartupError: the flags contradict each other, or name what is not served; one line.
    """
    values = _merge(config)
    if not config.speculation:
        if values:
            raise StartupError(f"--no-speculation and {_source(config)} contradict each other; give one.")
        return SpeculationConfig("", 0, forced=FORCED_IDS)
    if not values:
        return None
    for key, most in COUNTS.items():
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
            raise StartupError(f"{_format_source(config, key)} must be a whole number in [1, {most}], got {value!r}.")
    method, model = _method(config, values)
    longest = values.get("prompt_lookup_max")
    shortest = values.get("prompt_lookup_min")
    if longest is None:
        longest = max(LONGEST, shortest or 0)
    if shortest is None:
        shortest = min(SHORTEST, longest)
    if shortest > longest:
        low, high = _format_source(config, LOOKUP[1]), _format_source(config, LOOKUP[0])
        raise StartupError(f"{low} ({shortest}) must not be greater than {high} ({longest}).")
    drafts = values.get("num_speculative_tokens") or DEFAULT_DRAFTS
    rows = values.get("disable_by_batch_size")
    most = 0 if rows is None else rows - 1
    return SpeculationConfig(method, drafts, shortest, longest, most, config.spec_always, model=model)


def _merge(config: EngineConfig) -> dict[str, Any]:
    """Returns the values of ``--speculative-config`` or of the single flags, by its keys; only one may be given."""
    single = {
        "method": config.spec_method or None,
        "model": config.spec_model or None,
        "num_speculative_tokens": config.spec_tokens,
        "prompt_lookup_max": config.ngram_prompt_lookup_max,
        "prompt_lookup_min": config.ngram_prompt_lookup_min,
        "disable_by_batch_size": config.spec_disable_by_batch_size,
    }
    single = {key: value for key, value in single.items() if value is not None}
    whole = config.speculative_config
    if whole and single:
        raise StartupError(f"{FLAG} and {SINGLE[next(iter(single))]} are two ways to say the same; give one.")
    for key in whole:
        if key not in KEYS and key not in NO_EFFECT:
            hint = _hint(key, (*KEYS, *NO_EFFECT))
            raise StartupError(f"{FLAG}: unknown key {key!r}{hint}; it takes {', '.join(KEYS)}.")
    return {key: value for key, value in whole.items() if key in KEYS and value is not None} or single


SINGLE = {
    "method": "--spec-method",
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
    "prompt_lookup_max": "--ngram-prompt-lookup-max",
    "prompt_lookup_min": "--ngram-prompt-lookup-min",
    "disable_by_batch_size": "--spec-disable-by-batch-size",
}
"""Keys of ``--speculative-config`` -> the flag of each."""


def _hint(written: str, names: Iterable[str]) -> str:
    """Returns a question about a mistyped name, to be put after it; empty if none is like it."""
    found = suggest_name(written, names)
    return f" (did you mean {found}?)" if found else ""


def _source(config: EngineConfig) -> str:
    return FLAG if config.speculative_config else SINGLE[next(iter(_merge(config)))]


def _format_source(config: EngineConfig, key: str) -> str:
    """Returns how the user wrote a value, for messages."""
    return f"{FLAG}: {key}" if config.speculative_config else SINGLE[key]


def _method(config: EngineConfig, values: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the source of drafts, and the folder of its model; empty: it needs none."""
    method, model = values.get("method"), values.get("model")
    if model in ("ngram", "[ngram]"):
        method, model = method or "ngram", None
    if method is None and model is not None:
        method = "draft_model"
    method = "ngram" if method in (None, "[ngram]", "ngram_gpu") else method
    if method in DRAFT_MODELS:
        name = f" {model}" if isinstance(model, str) else ""
        own = ", ".join(METHODS)
        raise StartupError(f"{_source(config)}: {method}{name} is not built; methods: {own}")
    if method not in METHODS:
        hint = _hint(str(method), METHODS)
        raise StartupError(f"{_format_source(config, 'method')}: {method!r} is none of {', '.join(METHODS)}{hint}.")
    if method in TEXTS and model is not None:
        raise StartupError(f"{_format_source(config, 'model')}: {method} needs no model; leave it out.")
    if method not in TEXTS and not (isinstance(model, str) and model):
        raise StartupError(f"{_format_source(config, 'model')} must be the folder of a checkpoint for {method}.")
    return str(method), model or ""


def _check_planned(config: EngineConfig, flag: str, device: str) -> None:
    """Raises StartupError where a flag does not go with a draft model on a device with planned shapes; one line."""
    refused = {
        "--kv-offloading-size": config.kv_offloading_size,
        "--cpu-offload-gb": config.cpu_offload_gb,
        "--learn-buckets on": config.learn_buckets == "on",
        "--bucket-profile": config.bucket_profile,
    }
    named = [name for name, value in refused.items() if value]
    if named:
        raise StartupError(f"{flag}: on {device} a draft model does not go with {named[0]}; leave one of them out")


def _check_draft(config: EngineConfig, model: ModelConfig, policy: Policy, device: str) -> None:
    """Raises StartupError where the device or another flag does not go with a draft model; one line."""
    flag = _source(config)
    if policy.rules:
        _check_planned(config, flag, device)
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        raise StartupError(f"{flag}: a draft model runs beside one rank; leave out -tp and -pp")
    if config.packed_weights_dir:
        raise StartupError(f"{flag}: packed weights are kept for one model; leave out --packed-weights-dir")
    if model.text.cross_attention_layers:
        raise StartupError(f"{flag}: {model.architecture} attends to images, which a draft model does not read")


def draft_flag(config: EngineConfig) -> str:
    """Returns how the user asked for a draft model, for messages."""
    return _source(config)


def resolve_speculation(
    config: EngineConfig, model: ModelConfig, policy: Policy, device: str
) -> SpeculationConfig | None:
    """Returns what this engine drafts; None: nothing.

    Where nothing is asked for, n-grams are drafted on devices without a plan of shapes, which needs no more memory.

    Raises:
        StartupError: the device or the model does not go with what is asked for; one line.
    """
    found = requested_speculation(config)
    asked = found is not None and bool(found.drafts)
    if not policy.drafts:
        if asked:
            raise StartupError(f"{_source(config)}: the {device} backend does not verify guesses; --device cpu does")
        return None
    if model.pooling is not None:
        if asked:
            raise StartupError(f"{_source(config)}: a pooling engine generates nothing to draft; leave it out")
        return None
    if model.text.recurrent is not None and asked:
        raise StartupError(
            f"{_source(config)}: the recurrent state of {model.architecture} cannot be taken back where a guess is "
            "wrong; leave it out"
        )
    if policy.rules and not asked:
        return None
    if found is not None and found.model:
        _check_draft(config, model, policy, device)
    if policy.rules and model.text.cross_attention_layers:
        raise StartupError(f"{_source(config)}: {model.architecture} attends to images; --device cpu drafts its texts")
    if model.text.recurrent is not None:
        found = SpeculationConfig("", 0, forced=FORCED_IDS)
    if found is None:
        found = SpeculationConfig(rows=DEFAULT_ROWS, always=config.spec_always)
    ids = (model.image_token, model.video_token, model.placeholder_token)
    return replace(found, skipped=frozenset(token for token in ids if token >= 0))
