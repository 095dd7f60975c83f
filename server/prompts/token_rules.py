"""Makes the rule of a prompt's answers from sampling parameters: allowed ids, bad words, thinking budget,
repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trencadis.core.errors import BadRequest
from trencadis.core.request import SamplingParams
from trencadis.core.structured_outputs import Repetition, RepetitionDetectionParams, Rule, ThinkingBudget
from trencadis.server.prompts.sampling_params import MAX_WORDS
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.reasoning_parser import ReasoningFormat

if TYPE_CHECKING:
    from trencadis.server.prompts.prompt import Prompt


def add_rule(
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab: int,
    reasoning: ReasoningFormat | None = None,
    continued: bool = False,
) -> None:
    """Adds the restrictions in ``params`` to the prompt's rule, whose grammar stays.

    Args:
        vocab: number of ids that the model can sample.
        reasoning: the format of the model's reasoning; None: not known.
        continued: the prompt ends within a message of the assistant.

    Raises:
        BadRequest: an id is outside of the vocabulary, there are too many words, or a thinking budget is set and the
        model's reasoning format is not known.
    """
    allowed, words = params.allowed_token_ids, params.bad_words
    budget, repetition = params.thinking_token_budget, params.repetition_detection
    if allowed is None and not words and budget is None and repetition is None:
        return
    prompt.rule = replace(
        prompt.rule or Rule(),
        allowed=_check_allowed_ids(allowed or (), vocab),
        words=_tokenize_words(words, tokenizer),
        thinking=None
        if budget is None
        else _make_thinking_budget(budget, reasoning, prompt.tokens, tokenizer, continued),
        repetition=None if repetition is None else _make_repetition_rule(repetition),
    )


def _check_allowed_ids(ids: Sequence[int], vocab: int) -> tuple[int, ...]:
    bad = next((t for t in ids if not 0 <= t < vocab), None)
    if bad is not None:
        raise BadRequest(
            f"allowed_token_ids contains {bad}, outside the vocabulary of {vocab}.", param="allowed_token_ids"
        )
    return tuple(sorted(set(ids)))


def _tokenize_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns each word's ids at the start of a text, and also after a blank if these begin differently and are equally
    many.

    A longer form after a blank would be the blank and the word, which the first form covers.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), allow_special=False))
        blank = tuple(tokenizer.encode(f" {word.lstrip()}", allow_special=False))
        if not bare:
            raise BadRequest("A bad word must be at least one token.", param="bad_words")
        found[bare] = None
        if blank and blank[0] != bare[0] and len(blank) == len(bare):
            found[blank] = None
        if len(found) > MAX_WORDS:
            raise BadRequest(f"bad_words must be at most {MAX_WORDS} sequences of tokens.", param="bad_words")
    return tuple(found)


def _make_thinking_budget(
    budget: int, form: ReasoningFormat | None, prompt: Sequence[int], tokenizer: Tokenizer, continued: bool
) -> ThinkingBudget | None:
    if form is None:
        raise BadRequest(
            "thinking_token_budget needs a model whose thoughts can be told from its answers (--reasoning-parser).",
            param="thinking_token_budget",
        )
    inside, over = form.find_state(tokenizer, prompt, continued)
    if over:
        return None
    start, end = (tuple(tokenizer.encode(tag)) for tag in form.tags)
    return ThinkingBudget(budget, start, end, inside)


def _make_repetition_rule(asked: RepetitionDetectionParams) -> Repetition | None:
    if asked.max_pattern_size == 0:
        return None
    return Repetition(max(asked.min_pattern_size, 1), asked.max_pattern_size, asked.min_count)
