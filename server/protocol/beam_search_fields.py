"""Beam search in a request: vLLM's fields, and the fields that cannot be combined with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json
from trencadis.core.request import MAX_BEAMS, MAX_LOGPROBS, BeamRule

FIELD = "use_beam_search"
MOST_PENALTY = 10.0
"""Largest length_penalty, up or down: length ** penalty stays a number."""
UNUSED = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Sampling fields, which beam search does not use."""
REFUSED = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "prompt_logprobs",
    "logprob_token_ids", "allowed_token_ids", "bad_words", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "thinking_token_budget", "repetition_detection",
)  # fmt: skip
"""Fields that would change the search; beams are ranked by the model's unchanged probabilities."""
NEUTRAL: tuple[Json, ...] = (None, 0, [], {}, False)


class BeamFields(Protocol):
    """The part of a request that concerns beams."""

    use_beam_search: bool
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    stream: bool | None

    @property
    def shows_tokens(self) -> bool: ...


def check_beams(request: BeamFields) -> None:
    """Checks that a request has no field that beam search cannot honour.

    Raises:
        BadRequest: there is one; the message names it.
    """
    penalty = request.length_penalty
    if penalty is not None and not -MOST_PENALTY <= penalty <= MOST_PENALTY:
        raise BadRequest(f"length_penalty must be in [-{MOST_PENALTY:g}, {MOST_PENALTY:g}].", param="length_penalty")
    if not request.use_beam_search:
        return
    if request.stream:
        raise BadRequest("Beam search cannot be streamed: no token is final before the end.", param="stream")
    for name in REFUSED:
        value = getattr(request, name, None)
        neutral = 1.0 if name == "repetition_penalty" else None
        if value not in NEUTRAL and value != neutral:
            raise BadRequest(f"{name} cannot be combined with {FIELD}.", param=name)
    kind = (getattr(request, "response_format", None) or {}).get("type", "text")
    if kind != "text":
        raise BadRequest(f"response_format cannot be combined with {FIELD}.", param="response_format")
    choice = getattr(request, "tool_choice", None)
    if choice not in (None, "auto", "none"):
        raise BadRequest(f"tool_choice cannot be combined with {FIELD}: it constrains the answer.", param="tool_choice")
    if getattr(request, "echo", False) and isinstance(getattr(request, "logprobs", None), int):
        raise BadRequest(f"echo with logprobs cannot be combined with {FIELD}.", param="echo")


def check_width(width: int, ends: int, most: int) -> None:
    """Checks that there are enough best ids for the number of beams.

    Args:
        ends: ids that end an answer.
        most: log-probabilities that a request may ask for (``--max-logprobs``); -1: all.

    Raises:
        BadRequest: ``param`` is ``n``, the number of beams.
    """
    reported = MAX_LOGPROBS if most < 0 else min(most, MAX_LOGPROBS)
    widest = min(MAX_BEAMS, reported // 2, MAX_LOGPROBS - ends)
    if not 1 <= width <= widest:
        raise BadRequest(f"Beam search keeps 1 to {widest} beams (n), half of max_logprobs; got {width}.", param="n")


def check_reported(logprobs: int | None) -> None:
    """Raises BadRequest if a beam search is to report more log-probabilities with a token than its step computes."""
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise BadRequest(f"Beam search reports at most {MAX_LOGPROBS} logprobs, got {logprobs}.", param="logprobs")


def make_beam_rule(request: BeamFields) -> BeamRule:
    """Returns the search parameters of a request that asks for beam search."""
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return BeamRule(penalty, read_early(request.early_stopping))


def read_early(given: bool | str | None) -> bool | None:
    """Reads transformers' early_stopping: a truth value, or ``never``, which is None here."""
    return None if given == "never" else bool(given)


def list_unused_beam_fields(request: BeamFields) -> Iterator[str]:
    """Yields names of fields that have no effect with beam search, or only with it."""
    names = UNUSED if request.use_beam_search else ("length_penalty", "early_stopping")
    yield from (name for name in names if getattr(request, name) not in NEUTRAL)
