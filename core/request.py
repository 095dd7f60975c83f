"""A request to the engine: tokens, media spans and sampling parameters. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.core.flag_declaration import MOST, Bound
from trencadis.core.json_types import Json
from trencadis.core.media_spans import MediaSpan
from trencadis.core.output_constraints import (
    GuidedDecodingParams,
    RepetitionDetectionParams,
    Rule,
    StructuredOutputsParams,
)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request uses.

    Args:
        digest: digest of the adapter's contents, which identifies it everywhere; names may be given again.
        path: its folder, from which every rank reads it.
        name: the name that it is served under, for messages and metrics.
        tower: True if the outputs of the vision tower change.
    """

    digest: str
    path: str
    name: str
    tower: bool = False


REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of a request's ``reasoning_effort``."""
MAX_LOGPROBS = 20
"""Top ids that every SAMPLE launch with log-probabilities reports; more of them take another launch."""
MAX_BEAMS = MAX_LOGPROBS // 2
"""Most beams of a request: half of the top ids that SAMPLE reports, so that enough are left besides those that end."""

MAX_BIAS = 300
MAX_SCORED = 128
"""Largest number of ``logprob_token_ids``."""
GREEDY_BELOW = 1e-5
NO_LOGPROB = -2
"""Target, in a SAMPLE launch, of a row that samples without log-probabilities; -1: with them."""
BOUNDS = {
    "n": Bound(1, 16384),
    "temperature": Bound(0.0, 2.0),
    "top_p": Bound(0.0, 1.0, above=True),
    "top_k": Bound(-1, MOST),
    "min_p": Bound(0.0, 1.0),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
    "repetition_penalty": Bound(0.0, 100.0, above=True),
    "min_tokens": Bound(0, MOST),
}
"""Bounds of the numeric values of ``SamplingParams``."""


def _check_bound(name: str, value: float, bound: Bound) -> None:
    if not bound.holds(value):
        raise BadRequest(f"{name} must be in {bound.span}, got {value!r}.", param=name)


def _as_list(given: Any) -> list[Any]:
    """Returns ``given`` as a list: a single text becomes one entry, None an empty list."""
    if isinstance(given, list):
        return given
    return [given] if isinstance(given, str) else [*given] if isinstance(given, Iterable) else []


class RequestOutputKind(Enum):
    """Contents of each output of a stream: everything so far, only new parts, or everything once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


UNSUPPORTED = {
    "logits_processors": "functions over logits",
    "extra_args": "arguments of plugins",
}
"""vLLM's parameters that would change an answer and are not supported, with a description."""


@dataclass(slots=True)
class SamplingParams:
    """How tokens are sampled. Values follow the OpenAI API and vLLM's extensions; ranges are checked on construction.

    Order of application: logit_bias, repetition, frequency and presence penalties, masks (min_tokens), then argmax
    (temperature < 1e-5) or temperature, min_p, top_k, top_p and an inverse-CDF draw. ``logprobs`` are computed from raw
    logits.

    Args:
        stop: texts that end the answer; a single text or None is accepted, too.
        truncate_prompt_tokens: keep only the last tokens of the prompt (offline use); -1: as many as the model
            supports.
        logprobs, prompt_logprobs: number of top ids reported with each token; -1: the whole vocabulary
            (``resolve_logprobs``).
        detokenize: True if the answer has text in addition to its ids.
        spaces_between_special_tokens: no effect; special tokens are shown without added blanks.
        output_kind: contents of each output of ``AsyncLLM.generate`` and ``LLMEngine.step``.
        best_of: older name of ``n``.
        logprob_token_ids: at most ``MAX_SCORED`` ids whose log-probabilities are reported with each token, instead of
            the top ids.
        flat_logprobs: return log-probabilities as a few long lists (``FlatLogprobs``, offline use).
        skip_reading_prefix_cache: compute the whole prompt, even if parts are cached.
        skip_clone: no effect; an engine always works on a copy.
        structured_outputs: the form of the answers (offline use); ``guided_decoding`` is its older name.
        allowed_token_ids: only these ids are sampled. EOS must be listed, except with a grammar.
        bad_words: texts that must not occur in the answer, at its start or after a blank.
        thinking_token_budget: largest number of thinking tokens; thinking is then ended. -1 or None: no limit.

    The last parameters of vLLM are accepted but not supported (``UNSUPPORTED``).

    Raises:
        BadRequest: a value is out of range or not supported; ``param`` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    best_of: int | None = None
    skip_clone: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logprob_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    flat_logprobs: bool = False
    logits_processors: Any = field(default=None, repr=False)
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: GuidedDecodingParams | None = None
    extra_args: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            _check_bound(name, getattr(self, name), bound)
        for name in LISTS:
            if not isinstance(getattr(self, name), list):
                setattr(self, name, _as_list(getattr(self, name)))
        for name, read in READERS.items():
            value = getattr(self, name)
            if value if name in LISTS else value is not None:
                setattr(self, name, read(value, self))

    def clone(self) -> SamplingParams:
        """Returns an independent copy, whose values are checked again."""
        bias = None if self.logit_bias is None else dict(self.logit_bias)
        allowed = None if self.allowed_token_ids is None else [*self.allowed_token_ids]
        return replace(
            self, stop=[*self.stop], stop_token_ids=[*self.stop_token_ids], logit_bias=bias, allowed_token_ids=allowed
        )

    @property
    def greedy(self) -> bool:
        """True if the next token is the argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def reports(self) -> bool:
        """True if log-probabilities of the answer's tokens are requested."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def needs_state(self) -> bool:
        """True if the sampler keeps counts or biases for this request (a RESET is issued when it starts)."""
        penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalty or self.logit_bias)


LISTS = ("stop", "stop_token_ids", "bad_words")
"""Parameters that may also be given as a single value or None."""
Reader = Callable[[Any, SamplingParams], Any]


def _most_tokens(value: int, params: SamplingParams) -> int:
    _check_bound("max_tokens", value, Bound(1 if params.prompt_logprobs is None else 0, MOST))
    if params.min_tokens > value:
        raise BadRequest(
            f"min_tokens={params.min_tokens} cannot be greater than max_tokens={value}.", param="min_tokens"
        )
    return value


def _stops(value: list[str], params: SamplingParams) -> list[str]:
    if not all(value):
        raise BadRequest("stop strings must not be empty.", param="stop")
    if value and not params.detokenize:
        raise BadRequest("stop strings need detokenize=True.", param="stop")
    return value


def _words(value: list[str], params: SamplingParams) -> list[str]:
    if any(not isinstance(word, str) or not word.strip() for word in value):
        raise BadRequest("bad_words must be texts that are not empty.", param="bad_words")
    return list(dict.fromkeys(value))


def _repetition(
    value: RepetitionDetectionParams | Mapping[str, int], params: SamplingParams
) -> RepetitionDetectionParams:
    return RepetitionDetectionParams(**value) if isinstance(value, Mapping) else value


def _budget(value: Json, params: SamplingParams) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise BadRequest(
            f"thinking_token_budget must be a number of tokens, or -1 for any, got {value!r}.",
            param="thinking_token_budget",
        )
    return None if value == -1 else value


def _best_of(value: int, params: SamplingParams) -> int:
    if value != params.n:
        raise BadRequest(f"best_of={value} is not built; n={params.n} answers are returned.", param="best_of")
    return value


def _bounded_reader(name: str, bound: Bound, beside: int | None = None) -> Reader:
    """Returns a reader that accepts numbers within ``bound``, and the value ``beside``."""

    def read(value: Any, params: SamplingParams) -> Any:
        if value != beside:
            _check_bound(name, value, bound)
        return value

    return read


def _count_reader(name: str, least: int, most: int, text: str) -> Reader:
    def read(value: Any, params: SamplingParams) -> Any:
        if not least <= len(value) <= most:
            raise BadRequest(f"{name} {text}", param=name)
        return value

    return read


def _refuse_unsupported(name: str, what: str) -> Reader:
    def read(value: Json, params: SamplingParams) -> None:
        if value is not False and value not in ([], {}):
            raise BadRequest(f"SamplingParams.{name} is not supported: {what}.", param=name)

    return read


READERS: dict[str, Reader] = {
    "repetition_detection": _repetition,
    "seed": _bounded_reader("seed", Bound(-(2**63), 2**63 - 1)),
    "logprobs": _bounded_reader("logprobs", Bound(-1, MOST)),
    "prompt_logprobs": _bounded_reader("prompt_logprobs", Bound(-1, MOST)),
    "max_tokens": _most_tokens,
    "logprob_token_ids": _count_reader("logprob_token_ids", 1, MAX_SCORED, f"holds 1 to {MAX_SCORED} ids."),
    "truncate_prompt_tokens": _bounded_reader("truncate_prompt_tokens", Bound(1, MOST), beside=-1),
    "logit_bias": _count_reader("logit_bias", 0, MAX_BIAS, f"holds at most {MAX_BIAS} entries."),
    "stop": _stops,
    "allowed_token_ids": _count_reader("allowed_token_ids", 1, MOST, "must name at least one token."),
    "bad_words": _words,
    "thinking_token_budget": _budget,
    "best_of": _best_of,
    **{name: _refuse_unsupported(name, what) for name, what in UNSUPPORTED.items()},
}
"""Parameter -> function that checks and converts a given value."""


def resolve_logprobs(name: str, value: int, most: int, vocab: int) -> int:
    """Returns the number of top ids that ``value`` of parameter ``name`` requests; -1 is the whole vocabulary.

    Args:
        most: the operator's limit (``max_logprobs``); -1: the whole vocabulary.

    Raises:
        BadRequest: ``value`` exceeds ``most`` or ``vocab``.
    """
    limit = vocab if most < 0 else min(most, vocab)
    wanted = vocab if value == -1 else value
    if not 0 <= wanted <= limit:
        raise BadRequest(f"{name} must be between 0 and {limit}, got {value}.", param=name)
    return wanted


@dataclass(frozen=True, slots=True)
class BeamRule:
    """Parameters of a beam search; ``params.n`` is the number of beams.

    Args:
        length_penalty: answers are ranked by the sum of their log-probabilities divided by length ** length_penalty.
        early_stopping: True: the search ends once ``params.n`` beams have ended. False: once no running beam is better
            at its present length. None: once no running beam can become better (for penalties above 0, at the maximum
            length).
    """

    length_penalty: float = 1.0
    early_stopping: bool | None = False


@dataclass(slots=True)
class Request:
    """One prompt and how to continue it; ``params.n`` choices share it.

    Args:
        id: unique while the request lives.
        tokens: prompt ids, placeholders expanded; at least one.
        spans: the media in the prompt, by ascending offset.
        positions: little-endian int32 [3, len(tokens)] rotary positions, or None where all three equal the index.
        delta: after the prompt, position = index + delta.
        salt: cache_salt; requests share cached blocks and images only under equal salts.
        priority: lower runs first.
        arrival: arrival time in seconds (``time.time``), the second key of the total order.
        rule: constraints on its choices beyond ``params``.
        beams: search for the ``params.n`` best answers instead of sampling; they are returned at the end, best first.
        tenant: the tenant that it is charged to under ``--scheduling-policy fair``.
        weight: weight of the tenant's share.
        pool: kind of pooling (``core.checkpoint.pooling_description``); "": tokens are generated.
        replica: with several engines, the one that the request is pinned to (-1: any), and after submission the one
            that it was sent to.
        prediction: ids of a text that the answer may repeat; it changes the speed of the answer alone.
        adapter: the LoRA adapter that answers; None: the base model.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    spans: list[MediaSpan] = field(default_factory=list)
    positions: bytes | None = None
    delta: int = 0
    salt: str = ""
    priority: int = 0
    arrival: float = 0.0
    rule: Rule | None = None
    beams: BeamRule | None = None
    tenant: str = ""
    weight: float = 1.0
    pool: str = ""
    replica: int = -1
    prediction: list[int] = field(default_factory=list)
    adapter: AdapterRef | None = None

    def key_of(self, span: MediaSpan) -> str:
        """Returns the arena key of one of its images: the digest combined with the salt and the tower's adapter."""
        if self.adapter is not None and self.adapter.tower:
            return f"{self.salt}\0{self.adapter.digest}\0{span.digest}"
        return f"{self.salt}\0{span.digest}" if self.salt else span.digest


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability (natural log, raw logits) of one token, and those of other ids at its position.

    The others are the top ids, best first, or those of ``logprob_token_ids``, whose ranks are then in ``top_ranks``.
    """

    token: int
    logprob: float
    rank: int
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    top_ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestStats:
    """Durations in seconds and counts of one choice, filled when it ends.

    Args:
        prefill: time from its first step to its first token.
        encode: time of the VISION launches with its images, as far as the host waited for them.
        images: images looked up in the arena; ``image_hits`` of them were found.
        launches: launches of the steps that it took part in; ``misses`` of them had an unplanned shape.
        first_buckets: buckets of its first step, which other rows may share; ``last_buckets``: those of its last step.
        ended: end time in seconds since 1970, by the clock of the engine's machine.
        drafted: ids that were drafted; ``accepted`` of them were part of the answer.
    """

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    encode: float = 0.0
    images: int = 0
    image_hits: int = 0
    launches: int = 0
    misses: int = 0
    first_buckets: list[str] = field(default_factory=list)
    last_buckets: list[str] = field(default_factory=list)
    ended: float = 0.0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Delta:
    """The additions of one step to one choice of a request.

    ``finish`` is None while it runs, else ``stop``, ``length``, ``repetition``, ``abort`` or ``error``; it is set
    exactly once per choice. ``stop_token`` is the id that ended it if that was not EOS; ``status`` and ``message``
    explain an error. ``pooled`` is little-endian float32 [width], set if a pooling request ends by ``stop``.
    """

    id: str
    choice: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    status: int = 0
    message: str = ""
    stats: RequestStats | None = None
    pooled: bytes = b""
