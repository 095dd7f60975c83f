"""Sampling parameters from a checkpoint's defaults and the fields of a request, within its limits. No web framework.

A key of generation_config.json that can change an answer is used, accepted at its neutral value, or refused; other keys
are ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.output_constraints import RepetitionDetectionParams
from trencadis.core.request import GREEDY_BELOW, MAX_BIAS, MAX_LOGPROBS, SamplingParams, resolve_logprobs
from trencadis.server.protocol.beam_search_fields import check_reported, check_width

if TYPE_CHECKING:
    from trencadis.server.protocol.base_request import GenerateRequest


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


TOO_LONG = (
    "This model's maximum context length is {} tokens. However, your prompt contains at least {} input tokens. Please "
    "reduce the length of the input prompt."
)
MAX_STOPS = 16
MAX_WORDS = 128
"""Most bad words of a request, and most sequences of ids that they may become."""
LONGEST_WORD = 256
"""Most characters of a bad word: they are tokenized on the event loop."""
REPETITION = frozenset(f.name for f in fields(RepetitionDetectionParams))
TAKEN = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed",
    "skip_special_tokens", "allowed_token_ids", "bad_words", "thinking_token_budget", "repetition_detection",
    "logprob_token_ids", "skip_reading_prefix_cache",
)  # fmt: skip
"""Fields of a request that become parameters of the same name."""
_TOKEN_ID = re.compile(r"\s*-?[0-9]{1,19}\s*")


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one request."""

    vocab: int
    max_logprobs: int = MAX_LOGPROBS
    max_choices: int = 128
    max_images: int = 0
    max_videos: int = 0
    max_prompts: int = 1024


Reader = Callable[[Json, RequestLimits], Json]


class SamplingRules(Protocol):
    """The server's defaults and limits of sampling parameters; ``TextService`` has them.

    ``eos``: ids that end a text.
    """

    defaults: SamplingDefaults
    limits: RequestLimits
    eos: frozenset[int]


def make_sampling_params(
    request: GenerateRequest, rules: SamplingRules, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Makes the engine's parameters of a parsed request; ``max_tokens`` is already resolved (``resolve_output_limit``).

    Raises:
        BadRequest: a value is out of range or contradicts another; the message says ``max_tokens``, whichever field was
        sent.
    """
    values: JsonObject = {**rules.defaults.values, "min_tokens": rules.defaults.get_min_tokens(max_tokens)}
    values |= {name: value for name in TAKEN if (value := getattr(request, name)) is not None}
    if request.use_beam_search:
        check_width(values.get("n", 1), len({*rules.eos, *values.get("stop_token_ids", ())}), rules.limits.max_logprobs)
        values |= OPENAI | {"temperature": 0.0}
        check_reported(logprobs)
    elif (request.n or 1) > 1:
        values["temperature"] = _get_temperature(request, rules, values["n"])
    values |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    values |= {name: read(values[name], rules.limits) for name, read in READERS.items() if values.get(name) is not None}
    return SamplingParams(**values)


def _get_temperature(request: GenerateRequest, rules: SamplingRules, n: int) -> float:
    """Returns the temperature of ``n`` > 1 sampled choices; raises BadRequest if it is greedy or ``n`` is too large."""
    if n > rules.limits.max_choices:
        raise BadRequest(f"n must be at most {rules.limits.max_choices}, got {n}.", param="n")
    temperature = rules.defaults.get_temperature(n) if request.temperature is None else request.temperature
    if temperature < GREEDY_BELOW:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {n}.", param="n")
    return temperature


def rename_error_fields(error: BadRequest, **names: str) -> BadRequest:
    """Returns ``error`` with the names of the fields that the client sent: ``max_tokens="max_completion_tokens"``."""
    message, param = error.message, error.param
    for ours, theirs in names.items():
        message, param = re.sub(rf"\b{ours}\b", theirs, message), theirs if param == ours else param
    return BadRequest(message, param=param)


def resolve_output_limit(
    name: str, asked: int | None, default: int | None, prompt: int, max_model_len: int, cap: int | None = None
) -> int:
    """Returns the most tokens of an answer: the request's value, else the default; at most the rest of the context and
    the operator's ``cap``.

    A client that always asks for the same number keeps its answers while its conversation grows, as with vLLM.

    Raises:
        BadRequest: the prompt leaves no room, or the request asks for more than any context has.
    """
    check_prompt_length(prompt, max_model_len)
    rest = max_model_len - prompt
    if asked is None:
        asked = rest if default is None else max(default, 1)
    elif asked > max_model_len:
        raise BadRequest(
            f"{name}={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            param=name,
        )
    return min(asked, rest, rest if cap is None else cap)


def check_prompt_length(prompt: int, max_model_len: int, min_output_tokens: int = 1) -> None:
    """Raises BadRequest if a prompt of at least ``prompt`` tokens leaves no room for an answer of
    ``min_output_tokens``.
    """
    if prompt + min_output_tokens > max_model_len:
        raise BadRequest(TOO_LONG.format(max_model_len, prompt), param="input_tokens")


def _make_logprobs_reader(name: str) -> Reader:
    def read(value: int, limits: RequestLimits) -> int:
        return resolve_logprobs(name, value, limits.max_logprobs, limits.vocab)

    return read


def _read_stops(value: str | list[str], limits: RequestLimits) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"At most {MAX_STOPS} stop strings are allowed, got {len(stops)}.", param="stop")
    if any(len(s) > 4096 for s in stops):
        raise BadRequest("A stop string has at most 4096 characters.", param="stop")
    return stops


def _read_bad_words(value: list[str], limits: RequestLimits) -> list[str]:
    if len(value) > MAX_WORDS:
        raise BadRequest(f"At most {MAX_WORDS} bad_words are allowed, got {len(value)}.", param="bad_words")
    if any(len(word) > LONGEST_WORD for word in value):
        raise BadRequest(f"A bad word has at most {LONGEST_WORD} characters.", param="bad_words")
    return value


def _read_repetition(value: JsonMapping, limits: RequestLimits) -> RepetitionDetectionParams:
    unknown = next((name for name in value if name not in REPETITION), None)
    if unknown is not None:
        raise BadRequest(f"repetition_detection has no field {unknown[:40]!r}.", param="repetition_detection")
    return RepetitionDetectionParams(**value)


def _make_ids_reader(name: str) -> Reader:
    def read(value: list[int], limits: RequestLimits) -> list[int] | None:
        bad = next((t for t in value if not 0 <= t < limits.vocab), None)
        if bad is not None:
            raise BadRequest(f"{name} contains {bad}, outside the vocabulary of {limits.vocab}.", param=name)
        return value or None

    return read


def _read_logit_bias(value: Mapping[str, float], limits: RequestLimits) -> dict[int, float] | None:
    if len(value) > MAX_BIAS:
        raise BadRequest(f"logit_bias holds at most {MAX_BIAS} entries, got {len(value)}.", param="logit_bias")
    wrong = [key[:40] for key in value if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        shown = ", ".join(map(repr, wrong[:5]))
        one, several = f"the key {shown}, which is not a token id", f"keys that are no token ids: {shown}"
        raise BadRequest(f"logit_bias has {several if len(wrong) > 1 else one}.", param="logit_bias")
    out = {}
    for key, bias in value.items():
        token = int(key)
        if not 0 <= token < limits.vocab:
            raise BadRequest(
                f"token_id(s) [{token}] in logit_bias contain out-of-vocab token ids. Vocabulary size: {limits.vocab}",
                param="logit_bias",
            )
        if bias != bias:
            raise BadRequest("logit_bias must hold numbers.", param="logit_bias")
        out[token] = min(100.0, max(-100.0, float(bias)))
    return out or None


READERS: dict[str, Reader] = {
    "logprobs": _make_logprobs_reader("logprobs"),
    "prompt_logprobs": _make_logprobs_reader("prompt_logprobs"),
    "logit_bias": _read_logit_bias,
    "stop": _read_stops,
    "stop_token_ids": _make_ids_reader("stop_token_ids"),
    "seed": lambda seed, limits: None if seed == -1 else seed,
    "bad_words": _read_bad_words,
    "repetition_detection": _read_repetition,
    "logprob_token_ids": _make_ids_reader("logprob_token_ids"),
}
"""The conversion and check of each field that is sent."""
