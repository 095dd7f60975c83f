"""Bounds of what is inside the server: requests, tokens and pixels, and the bytes of answers.

A request may ask for more than its tokens: the log-probabilities of 20 other tokens at each place take a hundred times
as much memory as the text. So the bytes of an answer are bounded before it runs, and those of all that wait to be
written.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.errors import BadRequest, QueueFull
from trencadis.core.flag_declaration import MOST
from trencadis.core.host_memory import limited_budget
from trencadis.core.request import SamplingParams
from trencadis.server.tenants.tenant_registry import CURRENT, TenantAccount

TEXT = 8
"""Bytes of a token's text, or of its id in JSON."""
TOKEN_ID = 40
"""Bytes of a token's id that waits beside its text."""

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
        repeats_prompt: whether each choice has the log-probabilities of its prompt, as in completions.
        echo: whether an answer begins with its prompt.
        ids: whether an answer has the ids of its tokens.
        stream: whether it is written token by token, so that only one token of each choice waits, and what it says of
            the prompt.
        logprob_repeats: events at the end of a stream that repeat the log-probabilities of all tokens.
    """

    prompt_tokens: int
    logprobs_field: str
    limit_field: str
    table_field: str = "prompt_logprobs"
    repeats_prompt: bool = False
    echo: bool = False
    ids: bool = False
    stream: bool = False
    logprob_repeats: int = 0

    def keeps_tokens(self, params: SamplingParams) -> bool:
        """True if all tokens of an answer wait until its end."""
        return not self.stream or bool(self.logprob_repeats and params.logprobs is not None)

    def estimate_prompt(self, params: SamplingParams) -> Counter[str]:
        """Bytes of what an answer says of the prompt, by the field that asks for it."""
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
            found[self.logprobs_field] += params.n * (1 + params.logprobs) * CANDIDATE * (1 + self.logprob_repeats)
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


log = logging.getLogger("trencadis.server")

NAMES = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_queued_pixels")
RATE_WINDOW = 60.0
"""Seconds over which the rate of finished requests is measured."""
MAX_RETRY_AFTER = 120
"""Largest Retry-After, in seconds."""


class Amounts(NamedTuple):
    """Requests, tokens and pixels that are charged, in the order of ``NAMES``."""

    requests: int = 0
    tokens: int = 0
    pixels: int = 0


NOTHING = Amounts()


@dataclass(frozen=True)
class Bounds:
    """Limits of what may be in the server at a time, running or waiting.

    A resized pixel takes 6 bytes of this process: three colours for each of two frames.
    """

    requests: int = 2048
    tokens: int = 8 << 20
    pixels: int = 1 << 30
    body_bytes: int = 1 << 30

    def get_amounts(self) -> Amounts:
        """Returns the bounds of the amounts that tickets charge."""
        return Amounts(self.requests, self.tokens, self.pixels)


class Admission:
    """Counts admitted requests, tokens and pixels, and refuses requests that would exceed a bound. For one event
    loop.
    """

    def __init__(self, bounds: Bounds | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds = bounds or Bounds()
        self.bodies = BodyBudget(self.bounds.body_bytes)
        self.together: AbstractContextManager[object] = nullcontext()
        """Context manager inside which counters do not change between a check and the charge."""
        self._inside = [0, 0, 0]
        self.rejected = dict.fromkeys(NAMES, 0)
        self._clock = clock
        self._left: deque[tuple[float, Amounts]] = deque(maxlen=4096)

    @property
    def inside(self) -> list[int]:
        """Amounts that all tickets hold, in the order of ``NAMES``."""
        return self._inside

    @property
    def own(self) -> list[int]:
        """Amounts that tickets of this process hold, if several processes count together."""
        return self._inside

    def enter(self, requests: int = 1) -> Ticket:
        """Returns a ticket for ``requests`` choices; charge tokens and pixels once they are known.

        Raises:
            BadRequest: the request alone exceeds a bound.
            QueueFull: a bound is reached now, or a limit of the request's tenant.
        """
        early = _EARLY.get()
        if early is not None:
            return claim_early_ticket(early, requests)
        ticket = Ticket(self, account=CURRENT.get())
        ticket.charge(requests=requests)
        return ticket

    @contextmanager
    def hold_early_ticket(self) -> Iterator[None]:
        """Holds a ticket for one choice, for a request that waits before its route knows what it needs.

        The route's ``enter`` returns this ticket; if it is never called, nothing stays charged.

        Raises:
            QueueFull: as ``enter``.
        """
        ticket = Ticket(self, account=CURRENT.get())
        ticket.charge(requests=1)
        _EARLY.set(ticket)
        try:
            yield
        finally:
            if _EARLY.get() is ticket:
                _EARLY.set(None)
                if ticket.account is not None:
                    ticket.account.refund("requests_per_minute", 1)
                ticket.leave()

    def check(self, wanted: Amounts, held: Amounts = NOTHING) -> None:
        """Raises as ``enter`` does if ``wanted`` does not fit, in addition to the amounts ``held`` by the same
        caller.
        """
        for i, (inside, more, bound) in enumerate(zip(self.inside, wanted, self.bounds.get_amounts(), strict=True)):
            if held[i] + more > bound:
                # The request alone exceeds the bound, so waiting would not help.
                raise BadRequest(f"The request needs {held[i] + more} of at most {bound} ({NAMES[i]}).")
            if more and inside + more > bound:
                raise self._make_queue_full(i, inside + more - bound)

    def _make_queue_full(self, which: int, excess: int) -> QueueFull:
        """Counts a refusal because of ``excess`` of ``NAMES[which]``, and returns its exception."""
        self.rejected[NAMES[which]] += 1
        wait = self.estimate_retry_after(which, excess)
        log.debug("admission: a request is refused, because %d %s too many would wait", excess, NAMES[which])
        return QueueFull(f"The queue is full ({NAMES[which]}); try again later.", retry_after=wait)

    def take(self, wanted: Amounts) -> None:
        """Adds amounts that ``check`` has accepted."""
        self._inside = [a + b for a, b in zip(self._inside, wanted, strict=True)]

    def release(self, held: Amounts) -> None:
        """Releases the amounts of a ticket."""
        self.take(Amounts(*(-n for n in held)))
        self._left.append((self._clock(), held))

    def estimate_retry_after(self, which: int, excess: int) -> int:
        """Returns seconds for Retry-After: the time in which ``excess`` of ``NAMES[which]`` will be released at the
        last minute's rate. Before anything has been released, an estimate that grows with the number of requests.
        """
        self._drop_old_releases()
        gone = sum(held[which] for _, held in self._left)
        if not gone:
            return max(1, min(30, self.inside[0] // 64))
        seconds = max(self._clock() - self._left[0][0], 1.0)
        return max(1, min(MAX_RETRY_AFTER, round(excess * seconds / gone + 0.5)))

    def _drop_old_releases(self) -> None:
        start = self._clock() - RATE_WINDOW
        while self._left and self._left[0][0] < start:
            self._left.popleft()


@dataclass
class Ticket:
    """Amounts that one HTTP request holds until ``leave``."""

    admission: Admission
    held: Amounts = NOTHING
    left: bool = False
    account: TenantAccount | None = None
    answer: AnswerCharge | None = None
    reserved: int = 0
    """Tokens of the answer that the tenant has paid in advance."""

    def charge(self, *, requests: int = 0, tokens: int = 0, pixels: int = 0, output: int = 0) -> None:
        """Holds more, or raises as ``Admission.enter`` does; does nothing after ``leave``.

        Args:
            output: tokens that the answer may have, which the tenant's limit must have until ``leave``.
        """
        if self.left:
            return
        held, wanted = self.held, Amounts(requests, tokens, pixels)
        with self.admission.together:
            self.admission.check(wanted, held)
            if self.account is not None:
                self._spend(self.account, wanted, output)
            self.admission.take(wanted)
        self.held = Amounts(held.requests + requests, held.tokens + tokens, held.pixels + pixels)

    def _spend(self, account: TenantAccount, wanted: Amounts, output: int) -> None:
        """Charges the request's tenant, whose limits are looked at before anything is held."""
        if wanted.tokens:
            account.take("tokens_per_minute", wanted.tokens, output)
            self.reserved += output
        if wanted.pixels:
            account.take("pixels_per_minute", wanted.pixels)
        if wanted.requests:
            account.enter(wanted.requests, more=bool(self.held.requests))

    def take_answer(self) -> AnswerCharge | None:
        """Returns the charge of a large answer, which its writer releases from now on; None if it is not large."""
        charge = self.answer
        if charge is None or not charge.is_large:
            return None
        self.answer = None
        return charge

    def leave(self) -> None:
        """Releases everything; a second call does nothing."""
        if self.left:
            return
        self.left = True
        if self.answer is not None:
            self.answer.release()
        held, self.held = self.held, NOTHING
        if self.account is not None:
            self.account.leave(held.requests)
            self.account.give_back("tokens_per_minute", self.reserved)
        self.admission.release(held)


_EARLY: ContextVar[Ticket | None] = ContextVar("trencadis_early_ticket", default=None)
"""The ticket of this task's request before its route calls ``enter``."""


def claim_early_ticket(ticket: Ticket, requests: int) -> Ticket:
    """Returns the early ticket of this task for ``requests`` choices; it now belongs to the route."""
    _EARLY.set(None)
    try:
        ticket.charge(requests=requests - ticket.held.requests)
    except Exception:
        ticket.leave()
        raise
    return ticket


class BodyBudget:
    """Limits the bytes of request bodies, from their arrival until their media are prepared. For one event loop.

    Args:
        bound: maximum bytes at a time; a single body is always admitted.
    """

    def __init__(self, bound: int = 1 << 30) -> None:
        self.bound = bound
        self.rejected = 0
        self._inside = 0

    @property
    def inside(self) -> int:
        """Bytes of all bodies in memory."""
        return self._inside

    def add(self, count: int) -> None:
        """Adds ``count`` bytes; negative: removes them."""
        self._inside += count

    def open(self) -> BodyCharge:
        """Opens the account of one request."""
        return BodyCharge(self)


@dataclass
class BodyCharge:
    """Bytes of one body: those in memory, and all that have been received."""

    budget: BodyBudget
    held: int = 0
    received: int = 0
    done: bool = False

    def check_free(self, count: int) -> None:
        """Raises QueueFull if other bodies leave no room for ``count`` more bytes; charges nothing."""
        budget = self.budget
        if budget.inside + count > budget.bound and budget.inside > self.held:
            budget.rejected += 1
            raise QueueFull("Too many large requests are being read; try again later.", retry_after=1)

    def charge(self, count: int) -> None:
        """Charges ``count`` more bytes that were received.

        Raises:
            QueueFull: other bodies leave no room for them.
        """
        if not self.done and count:
            self.check_free(count)
            self.held += count
            self.budget.add(count)

    def give(self, count: int) -> None:
        """Releases ``count`` bytes."""
        if not self.done:
            self.held -= count
            self.budget.add(-count)

    def leave(self) -> None:
        """Releases all bytes; a second call does nothing."""
        self.budget.add(-self.held)
        self.held, self.done = 0, True
