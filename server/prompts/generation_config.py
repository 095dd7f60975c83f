"""Reads sampling defaults from a checkpoint's generation_config.json. A key that can change an answer is used, accepted
at its neutral value, or refused; other keys are ignored. No web framework."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonMapping

OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Defaults if neither request nor checkpoint sets a value."""
FILE = "generation_config.json"
FLAG = "--override-generation-config"
HINT = f"--generation-config vllm ignores the file, {FLAG} changes one key"

USED = (*OPENAI, "do_sample", "max_new_tokens", "max_length", "min_new_tokens", "eos_token_id")
NEUTRAL: dict[str, tuple[Json, ...]] = {
    "min_length": (0,), "max_time": (), "stop_strings": ("", []), "num_beams": (1,), "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0), "dola_layers": (), "typical_p": (1, 1.0), "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0), "top_h": (), "encoder_repetition_penalty": (1, 1.0), "diversity_penalty": (0, 0.0),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],), "constraints": ([],),
    "force_words_ids": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "sequence_bias": ({}, []), "token_healing": (False,), "guidance_scale": (1, 1.0),
    "watermarking_config": (), "exponential_decay_length_penalty": (), "num_return_sequences": (1,),
    "assistant_ensemble_weight": (),
}  # fmt: skip
"""Keys that are not supported, with their neutral values; null is always neutral."""
HARMLESS = frozenset({
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "early_stopping", "length_penalty", "use_cache",
    "renormalize_logits", "remove_invalid_values", "transformers_version", "cache_implementation",
    "prompt_lookup_num_tokens", "num_assistant_tokens",
})  # fmt: skip
"""Keys that change no answer without beams, an encoder or a second model."""
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults of fields that a request leaves out.

    Args:
        max_tokens: most tokens of an answer.
        max_length: most tokens of prompt and answer together, if ``max_tokens`` is None.
        min_tokens: fewest tokens of an answer.
        greedy: the checkpoint's default is greedy sampling (``do_sample: false``); several choices are sampled
        nevertheless.
        cap: most tokens of an answer, whatever a request asks for: ``max_new_tokens`` of the flag, or of a folder that
            ``--generation-config`` names.
    """

    values: Mapping[str, float] = field(default_factory=lambda: dict(OPENAI))
    max_tokens: int | None = None
    max_length: int | None = None
    min_tokens: int = 0
    greedy: bool = False
    cap: int | None = None

    @classmethod
    def read(cls, path: Path | None, mode: str = "auto", override: JsonMapping | None = None) -> SamplingDefaults:
        """Combines OpenAI's defaults, then generation_config.json (unless ``mode`` is ``vllm``), then ``override``.

        Raises:
            StartupError: a value is out of range or not implemented.
        """
        file: JsonMapping = {}
        where = Path(FILE)
        if mode != "vllm" and path is not None:
            where = (path if mode == "auto" else Path(mode)) / FILE
            file = _read_file(where, mode)
        given = {k: v for k, v in (override or {}).items() if v is not None}
        _check_override_keys(given)
        # A null in the override removes the file's value.
        kept = {k: v for k, v in file.items() if v is not None and k not in (override or {})}
        if "temperature" in given:
            kept.pop("do_sample", None)
        made = _make_defaults(_ConfigSources(JsonFields(given, FLAG), JsonFields(kept, where, hint=HINT)))
        operators = "max_new_tokens" in given or mode not in ("auto", "vllm")
        return replace(made, cap=made.max_tokens) if operators else made

    def get_max_tokens(self, prompt: int) -> int | None:
        """Returns the most tokens of an answer to ``prompt`` tokens if the request sets no limit; None: as many as
        fit.
        """
        if self.max_tokens is not None or self.max_length is None:
            return self.max_tokens
        return max(self.max_length - prompt, 1)

    def get_temperature(self, n: int) -> float:
        """Returns the temperature of a request for ``n`` choices that sets none."""
        return OPENAI["temperature"] if self.greedy and n > 1 else self.values["temperature"]

    def get_min_tokens(self, max_tokens: int | None) -> int:
        """Returns the fewest tokens of an answer of at most ``max_tokens`` if the request sets none; never below 0."""
        return self.min_tokens if max_tokens is None else min(self.min_tokens, max(max_tokens, 0))

    def __str__(self) -> str:
        return ", ".join(f"{k}={v:g}" for k, v in self.values.items()) + (
            f", max_tokens={self.max_tokens}" if self.max_tokens else ""
        )


@dataclass(frozen=True)
class _ConfigSources:
    """The keys of the override and the remaining keys of the file; each key is in one of them."""

    override: JsonFields
    file: JsonFields

    def select_source(self, key: str) -> JsonFields:
        return self.override if key in self.override.values else self.file

    def is_given(self, key: str) -> bool:
        return self.select_source(key).is_given(key)


def _make_defaults(sources: _ConfigSources) -> SamplingDefaults:
    for key, neutral in NEUTRAL.items():
        if sources.is_given(key) and sources.select_source(key).values[key] not in neutral:
            what = " or ".join(map(repr, neutral)) or "null"
            sources.select_source(key).refuse(key, f"it is not implemented, only {what} is accepted")

    def number(key: str, least: float, most: float, above: bool = False) -> float:
        return sources.select_source(key).number(key, least, most, OPENAI[key], above)

    def count(key: str, least: int) -> int | None:
        return sources.select_source(key).integer(key, least, MOST_TOKENS) if sources.is_given(key) else None

    values = {
        "temperature": number("temperature", 0, 2),
        "top_p": number("top_p", 0, 1, above=True),
        "top_k": sources.select_source("top_k").integer("top_k", -1, MOST_TOKENS, 0),
        "min_p": number("min_p", 0, 1),
        "repetition_penalty": number("repetition_penalty", 0, 100, above=True),
    }
    greedy = sources.is_given("do_sample") and not sources.select_source("do_sample").boolean("do_sample")
    if greedy:
        values["temperature"] = 0.0
    limit, least = count("max_new_tokens", 1), count("min_new_tokens", 0) or 0
    if limit is not None and least > limit:
        sources.select_source("min_new_tokens").refuse("min_new_tokens", f"max_new_tokens is {limit}")
    return SamplingDefaults(values, limit, count("max_length", 1), least, greedy)


def _read_file(where: Path, mode: str) -> JsonMapping:
    """Returns the values of the file; old checkpoints without one keep them in config.json."""
    found = read_json(where)
    if found is not None:
        return found
    if mode != "auto":
        raise StartupError(f"--generation-config {mode}: there is no {where}; auto reads the model's own, vllm none.")
    config = read_json(where.parent / "config.json") or {}
    text = config.get("text_config")
    values = {**text, **config} if isinstance(text, dict) else config
    return {k: v for k, v in values.items() if k in USED or k in NEUTRAL}


def _check_override_keys(given: JsonMapping) -> None:
    """Raises StartupError for a key of the flag that has no effect, because it is a mistake there."""
    if given.get("eos_token_id") is not None:
        raise StartupError(f"{FLAG}: eos_token_id is the checkpoint's; requests have stop_token_ids.")
    names = {*USED, *NEUTRAL, *HARMLESS}
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(USED))}."
            raise StartupError(f"{FLAG} has the unknown key {key[:40]!r}{hint}")
