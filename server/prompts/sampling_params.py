"""Sampling parameters from the fields of a request, within its limits. No web framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.request import GREEDY_BELOW, MAX_BIAS, MAX_LOGPROBS, SamplingParams, resolve_logprobs
from trencadis.core.structured_outputs import RepetitionDetectionParams
from trencadis.server.prompts.generation_config import OPENAI, SamplingDefaults
from trencadis.server.protocol.beam_search_fields import check_reported, check_width

if TYPE_CHECKING:
    from trencadis.server.protocol.base_request import GenerateRequest

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
