"""Offline beam search: vLLM's parameters and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping
from trencadis.core.request import BeamRule, RequestOutputKind, SamplingParams, resolve_logprobs
from trencadis.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from trencadis.server.protocol.beam_search_fields import MOST_PENALTY, check_width, read_early

if TYPE_CHECKING:
    from trencadis.server.prompts.prompt_builder import TextService


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of beam search, which returns the ``beam_width`` best answers instead of sampled ones.

    Args:
        beam_width: number of beams and of answers; at most half of ``max_logprobs``.
        max_tokens: maximum number of tokens of an answer.
        ignore_eos: True if answers end only by their length.
        temperature: no effect: beams are ranked by the model's own probabilities.
        length_penalty: answers are ranked by the sum of their log-probabilities over length ** length_penalty.
        include_stop_str_in_output: True if the token that ends an answer is part of it.
        early_stopping: as in transformers: True, False or ``never``.

    Raises:
        BadRequest: a value is out of range; ``param`` names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise BadRequest("Beam search takes no structured outputs.", param="structured_outputs")
        if not -MOST_PENALTY <= self.length_penalty <= MOST_PENALTY:
            raise BadRequest(
                f"length_penalty must be in [-{MOST_PENALTY:g}, {MOST_PENALTY:g}].", param="length_penalty"
            )
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens")


class EngineParams(NamedTuple):
    """Sampling parameters for the engine, and the beam rule (None: sampling)."""

    sampling: SamplingParams
    beams: BeamRule | None = None


GenerationParams = SamplingParams | BeamSearchParams


def engine_params(params: GenerationParams, service: TextService) -> EngineParams:
    """Returns the engine's parameters. For beam search they request the ``2 * beam_width`` best ids with each token, as
    in vLLM.

    Raises:
        BadRequest: ``max_logprobs`` allows fewer log-probabilities than requested, or too few ids for that many beams.
    """
    if isinstance(params, SamplingParams):
        sampling = params.clone()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            if value is not None:
                most, vocab = service.limits.max_logprobs, service.limits.vocab
                setattr(sampling, name, resolve_logprobs(name, value, most, vocab))
        return EngineParams(sampling)
    check_width(params.beam_width, 0 if params.ignore_eos else len(service.eos), service.limits.max_logprobs)
    sampling = SamplingParams(
        n=params.beam_width,
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logprobs=2 * params.beam_width,
    )
    return EngineParams(sampling, BeamRule(params.length_penalty, read_early(params.early_stopping)))


def final_output_only(given: EngineParams) -> EngineParams:
    """Returns the same parameters with a single output at the end."""
    return given._replace(sampling=replace(given.sampling, output_kind=RequestOutputKind.FINAL_ONLY))


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search. ``tokens`` and ``text`` include the prompt; ``logprobs`` do not."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    multi_modal_data: Mapping[str, object] | None = None
    mm_processor_kwargs: JsonMapping | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Answers to one prompt, best first, as many as the beam width."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def make_beam_output(output: RequestOutput, prompt: Any, service: TextService, keep_end: bool) -> BeamSearchOutput:
    """Returns the answers in vLLM's form; ``keep_end``: include the token that ended each."""
    media = prompt if isinstance(prompt, Mapping) else {}

    def sequence(one: CompletionOutput) -> BeamSearchSequence:
        ended = one.finish_reason == "stop" and not keep_end
        tokens = [*output.prompt_token_ids, *(one.token_ids[:-1] if ended else one.token_ids)]
        return BeamSearchSequence(
            tokens,
            [*(one.logprobs or [])],
            cum_logprob=one.cumulative_logprob or 0.0,
            text=service.tokenizer.decode(tokens, skip_special_tokens=False),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            multi_modal_data=media.get("multi_modal_data"),
            mm_processor_kwargs=media.get("mm_processor_kwargs"),
        )

    return BeamSearchOutput([sequence(one) for one in output.outputs])
