"""Sampling parameters from the fields of a request, within its limits. No web framework."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trencadis.core.errors import BadRequest
from trencadis.core.request import GREEDY_BELOW, MAX_BIAS, MAX_LOGPROBS, RepetitionDetectionParams, SamplingParams
from trencadis.server.prompts.generation_config import OPENAI, Defaults
from trencadis.server.protocol.beams import check_width

if TYPE_CHECKING:
    from trencadis.server.protocol.base import GenerateRequest

MAX_STOPS = 16
MAX_WORDS = 128
"""Most bad words of a request, and most sequences of ids that they may become."""
LONGEST_WORD = 256
"""Most characters of a bad word: they are tokenized on the event loop."""
REPETITION = frozenset(f.name for f in fields(RepetitionDetectionParams))
_TOKEN_ID = re.compile(r"\s*-?[0-9]{1,19}\s*")


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for."""

    vocab: int
    max_logprobs: int = MAX_LOGPROBS
    max_choices: int = 128
    max_images: int = 0
    max_videos: int = 0
    max_prompts: int = 1024


def sampling_params(
    request: GenerateRequest,
    *,
    defaults: Defaults,
    limits: RequestLimits,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    eos: Collection[int] = (),
) -> SamplingParams:
    """The engine's parameters of a parsed request; ``max_tokens`` is already resolved (``output_limit``).

    Raises:
        BadRequest: a value is out of range or contradicts another; it says ``max_tokens``, whatever the field was.
    """
    beams = request.use_beam_search

    def pick(name: str) -> float:
        if beams:
            return OPENAI[name]
        value = getattr(request, name)
        return defaults.values[name] if value is None else value

    n = 1 if request.n is None else request.n
    if beams:
        check_width(n, len({*eos, *(request.stop_token_ids or [])}), limits.max_logprobs)
    temperature = 0.0 if beams else _temperature(request, defaults, limits, n)
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and not 0 <= value <= limits.max_logprobs:
            raise BadRequest(f"{name} must be between 0 and {limits.max_logprobs}, got {value}.", param=name)
    return SamplingParams(
        n=n,
        temperature=temperature,
        top_p=pick("top_p"),
        top_k=int(pick("top_k")),
        min_p=pick("min_p"),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty"),
        logit_bias=_bias(request.logit_bias, limits.vocab),
        max_tokens=max_tokens,
        min_tokens=_least(request.min_tokens, defaults.min_tokens, max_tokens),
        stop=_stops(request.stop),
        stop_token_ids=_ids("stop_token_ids", request.stop_token_ids, limits.vocab),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        seed=None if request.seed == -1 else request.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=_words(request.bad_words or []),
        thinking_token_budget=request.thinking_token_budget,
        repetition_detection=_repetition(request.repetition_detection),
        logprob_token_ids=_ids("logprob_token_ids", request.logprob_token_ids, limits.vocab) or None,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
    )


def _temperature(request: GenerateRequest, defaults: Defaults, limits: RequestLimits, n: int) -> float:
    """The temperature of ``n`` drawn choices."""
    if n > limits.max_choices:
        raise BadRequest(f"n must be at most {limits.max_choices}, got {n}.", param="n")
    temperature = defaults.temperature(n) if request.temperature is None else request.temperature
    if n > 1 and temperature < GREEDY_BELOW:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {n}.", param="n")
    return temperature


@contextmanager
def sent_as(**names: str) -> Iterator[None]:
    """Inside, a BadRequest names the fields that the client sent: ``sent_as(max_tokens="max_completion_tokens")``."""
    try:
        yield
    except BadRequest as error:
        message, param = error.message, error.param
        for ours, theirs in names.items():
            message, param = re.sub(rf"\b{ours}\b", theirs, message), theirs if param == ours else param
        raise BadRequest(message, param=param) from None


def output_limit(name: str, asked: int | None, default: int | None, prompt: int, max_model_len: int) -> int:
    """Most tokens of an answer: as asked, else the default, at most the rest of the context.

    Raises:
        BadRequest: the prompt leaves no room, or the request asks for more than the context has.
    """
    too_long(prompt, max_model_len)
    rest = max_model_len - prompt
    if asked is None:
        return rest if default is None else min(rest, max(default, 1))
    if asked > max_model_len:
        raise BadRequest(
            f"{name}={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            param=name,
        )
    if asked > rest:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains {prompt} input tokens. Please reduce one of them.",
            param=name,
        )
    return asked


def too_long(prompt: int, max_model_len: int, room: int = 1) -> None:
    """Raises BadRequest if a prompt of at least ``prompt`` tokens leaves no room for an answer of ``room``."""
    if prompt + room > max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{prompt} input tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )


def _least(asked: int | None, default: int, max_tokens: int | None) -> int:
    """``min_tokens``; the default is lowered to ``max_tokens``."""
    if asked is not None:
        return asked
    return default if max_tokens is None else min(default, max_tokens)


def _stops(value: str | list[str] | None) -> list[str]:
    stops = [value] if isinstance(value, str) else list(value or [])
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"At most {MAX_STOPS} stop strings are allowed, got {len(stops)}.", param="stop")
    if any(len(s) > 4096 for s in stops):
        raise BadRequest("A stop string has at most 4096 characters.", param="stop")
    return stops


def _words(value: list[str]) -> list[str]:
    if len(value) > MAX_WORDS:
        raise BadRequest(f"At most {MAX_WORDS} bad_words are allowed, got {len(value)}.", param="bad_words")
    if any(len(word) > LONGEST_WORD for word in value):
        raise BadRequest(f"A bad word has at most {LONGEST_WORD} characters.", param="bad_words")
    return value


def _repetition(value: Mapping[str, Any] | None) -> RepetitionDetectionParams | None:
    if value is None:
        return None
    unknown = next((name for name in value if name not in REPETITION), None)
    if unknown is not None:
        raise BadRequest(f"repetition_detection has no field {unknown[:40]!r}.", param="repetition_detection")
    return RepetitionDetectionParams(**value)


def _ids(name: str, value: list[int] | None, vocab: int) -> list[int]:
    bad = next((t for t in value or [] if not 0 <= t < vocab), None)
    if bad is not None:
        raise BadRequest(f"{name} contains {bad}, outside the vocabulary of {vocab}.", param=name)
    return list(value or [])


def _bias(value: Mapping[str, float] | None, vocab: int) -> dict[int, float] | None:
    if not value:
        return None
    if len(value) > MAX_BIAS:
        raise BadRequest(f"logit_bias holds at most {MAX_BIAS} entries, got {len(value)}.", param="logit_bias")
    out = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise BadRequest(f"logit_bias has the key {key[:40]!r}, which is not a token id.", param="logit_bias")
        token = int(key)
        if not 0 <= token < vocab:
            raise BadRequest(
                f"token_id(s) [{token}] in logit_bias contain out-of-vocab token ids. Vocabulary size: {vocab}",
                param="logit_bias",
            )
        if bias != bias:
            raise BadRequest("logit_bias must hold numbers.", param="logit_bias")
        out[token] = min(100.0, max(-100.0, float(bias)))
    return out
