"""Bounds the bytes of answers: of each one before it runs, and of all that wait to be written.

A request may ask for more than its tokens: the log-probabilities of 20 other tokens at each place take a hundred times
as much memory as the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trencadis.core.errors import BadRequest, QueueFull
from trencadis.core.flag_options import MOST
from trencadis.core.host_memory import limited_budget
from trencadis.core.request import SamplingParams

TEXT = 8
"""Bytes of a token's text, or of its id in JSON."""
TOKEN_ID = 40
"""Bytes of an id that waits to be told beside the text."""

CANDIDATE = 100
"""Bytes of a token in a list of log-probabilities: in JSON, or as it is kept until then."""

ALL_ANSWERS = 256 << 20
MEMORY_SHARE = 1 / 12
"""Largest share of this machine's or container's memory for answers that wait."""
FREE = 1 << 20
"""Bytes of an answer that does not count among those that wait: most answers are far below."""


@dataclass(frozen=True)
class AnswerShape:
    """The parts of an answer that a request asks for, in addition to its sampling parameters.

    Args:
        prompt_tokens: of one prompt.
        logprobs_field: the field that asks for other tokens at each place of an answer.
        limit_field: the field that limits an answer's tokens; "": the request leaves it to the server.
        table_field: the field that asks for the log-probabilities of the prompt.
        repeats_prompt: whether each choice has what is told of the prompt, as in completions.
        echo: whether an answer begins with its prompt.
        ids: whether ids are told beside texts.
        stream: whether it is written token by token, so that only one token of each choice waits, and what is told of
            the prompt.
        retold: events at the end of a stream that tell the log-probabilities of all tokens again.
    """

    prompt_tokens: int
    logprobs_field: str
    limit_field: str
    table_field: str = "prompt_logprobs"
    repeats_prompt: bool = False
    echo: bool = False
    ids: bool = False
    stream: bool = False
    retold: int = 0

    def keeps_tokens(self, params: SamplingParams) -> bool:
        """True if all tokens of an answer wait until its end."""
        return not self.stream or bool(self.retold and params.logprobs is not None)

    def estimate_prompt(self, params: SamplingParams) -> Counter[str]:
        """Bytes of what is told of the prompt, by the field that asks for it."""
        found, copies = Counter[str](), params.n if self.repeats_prompt else 1
        if params.prompt_logprobs is not None:
            found[self.table_field] += copies * self.prompt_tokens * (1 + params.prompt_logprobs) * CANDIDATE
        if self.echo:
            listed = 0 if params.logprobs is None else (1 + params.logprobs) * CANDIDATE
            found["echo"] += copies * self.prompt_tokens * (TEXT + listed)
        if self.ids:
            found["return_token_ids"] += copies * self.prompt_tokens * TEXT
        return found

    def estimate_token(self, params: SamplingParams) -> Counter[str]:
        """Bytes of one token of each choice, by field."""
        found = Counter({self.limit_field: params.n * (TEXT + TOKEN_ID * self.ids)})
        if params.logprobs is not None:
            found[self.logprobs_field] += params.n * (1 + params.logprobs) * CANDIDATE * (1 + self.retold)
        return found


class AnswerBudget:
    """Bytes of answers. For one event loop.

    Args:
        most: of one answer (``--max-answer-bytes``).
        total: of all large answers that run or wait to be written; None: 256 MiB, or a share of the memory of a small
            machine.
        unread: returns the bytes of it that clients of streams have not read.
    """

    def __init__(self, most: int = 64 << 20, total: int | None = None, unread: Callable[[], int] = lambda: 0) -> None:
        usual = limited_budget(ALL_ANSWERS, MEMORY_SHARE) if total is None else total
        self.most, self.total, self.unread = most, max(usual, most), unread
        self.held = 0

    def fit(self, shape: AnswerShape, params: SamplingParams, taken: int = 0) -> int:
        """Returns the bytes that one prompt's answers may take; lowers ``params.max_tokens`` to the budget if the
        request leaves it to the server.

        Args:
            taken: bytes of the request's other prompts.

        Raises:
            BadRequest: the answer could be larger than the budget; ``param`` is the field to lower.
        """
        found = shape.estimate_prompt(params)
        each = shape.estimate_token(params)
        rest = self.most - taken - found.total()
        keeps = shape.keeps_tokens(params)
        tokens = min(params.max_tokens or 0, MOST if keeps else 1)
        if tokens * each.total() > rest and rest > 0 and keeps and not shape.limit_field:
            tokens = params.max_tokens = max(rest // each.total(), 1)
        found.update({field: tokens * size for field, size in each.items()})
        if taken + found.total() > self.most:
            raise self._too_large(taken + found.total(), found, params)
        return found.total()

    def check_values(self, size: int, field: str) -> None:
        """Checks an answer of pooled values, of which ``size`` bytes are held until they are written.

        Raises:
            BadRequest: it is larger than the budget; ``param`` is ``field``, which makes it so large.
        """
        if size > self.most:
            message = f"The answer could take {size} bytes; at most {self.most} are allowed. Lower {field}."
            raise BadRequest(message, param=field)

    def _too_large(self, size: int, found: Mapping[str, int], params: SamplingParams) -> BadRequest:
        field = max(found, key=lambda name: found[name]) or "max_tokens"
        if params.n > 1 and field != "return_token_ids":
            field = f"{field} or n"
        message = f"The answer could take {size} bytes; at most {self.most} are allowed. Lower {field}."
        return BadRequest(message, param=field.partition(" ")[0])

    def hold(self, size: int, before: AnswerCharge | None = None) -> AnswerCharge:
        """Counts an answer of ``size`` bytes until it is released.

        Args:
            before: the charge of the same request's other answers, which becomes part of this one.

        Raises:
            QueueFull: other large answers leave no room.
        """
        if before is not None:
            size += before.size
            before.release()
        counted = size if size > FREE else 0
        held = self.held + self.unread()
        if counted and held and held + counted > self.total:
            raise QueueFull("Too many large answers wait to be written; try again later.", retry_after=1)
        self.held += counted
        return AnswerCharge(self, size, counted)


@dataclass
class AnswerCharge:
    """The bytes that one request's answers may take.

    Args:
        size: bytes, as estimated.
        held: those of them that count in the budget.
    """

    budget: AnswerBudget
    size: int
    held: int

    @property
    def is_large(self) -> bool:
        """True if the answer is to be written in slices."""
        return self.size > FREE

    def release(self) -> None:
        """Stops counting; a second call does nothing."""
        self.budget.held -= self.held
        self.held = 0
