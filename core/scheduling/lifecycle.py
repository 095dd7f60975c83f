"""How requests enter and end, and how a step's results reach them. Each choice ends exactly once."""

from __future__ import annotations

import zlib

import numpy as np

from trencadis.core.buckets import Stage
from trencadis.core.kv.prefix import Chain
from trencadis.core.request import Delta, Request, RequestStats, TokenLogprob
from trencadis.core.scheduling.scheduler import InFlightStep, Scheduler
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus
from trencadis.core.step import HeadOutput, StepOutput, TargetScores, UInt8


class Lifecycle:
    """Owns the choices of live requests; the scheduler decides what they run.

    ``outbox`` collects Deltas between two calls of ``collect``.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, list[Sequence]] = {}
        self.choices: dict[int, Sequence] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._keys = 0
        self._outbox: list[Delta] = []
        self._touched: list[Sequence] = []

    # In

    def add(self, request: Request) -> None:
        """Queues a request; one that can never run ends at once with an error Delta per choice."""
        limits = self.scheduler.limits
        if request.id in self.requests:
            self._refuse(request, 400, f"request id {request.id!r} is in use")
            return
        room = limits.max_model_len - len(request.tokens)
        scoring = request.params.max_tokens == 0
        if not request.tokens or room < (0 if scoring else 1):
            held = len(request.tokens)
            self._refuse(request, 400, f"the prompt of {held} tokens leaves no room in {limits.max_model_len}")
            return
        arena = self.scheduler.arena
        if any(s.length > arena.capacity for s in request.spans):
            self._refuse(request, 413, f"an image needs more than the {arena.capacity} rows of the image arena")
            return
        now = self.scheduler.clock()
        request.arrival = request.arrival or now
        family = [self._make(request, i, room, now) for i in range(request.params.n)]
        self.requests[request.id] = family
        self.choices.update((c.key, c) for c in family)
        self.prompt_tokens += len(request.tokens)
        family[0].family = family[1:]
        self.scheduler.enqueue(family[0])

    def _make(self, request: Request, index: int, room: int, now: float) -> Sequence:
        limits, p = self.scheduler.limits, request.params
        self._keys += 1
        stops = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else frozenset(limits.eos))
        banned = frozenset(p.stop_token_ids) | frozenset(limits.eos)
        seed = p.seed if p.seed is not None else zlib.crc32(request.id.encode()) ^ (limits.seed * 0x9E3779B1)
        shape = (3, len(request.tokens))
        positions = None
        if request.positions is not None:
            positions = np.frombuffer(request.positions, "<i4").reshape(shape).astype(np.int32, copy=False)
        return Sequence(
            key=self._keys,
            request=request,
            index=index,
            seed=seed,
            tokens=list(request.tokens),
            limit=room if p.max_tokens is None else min(room, p.max_tokens),
            stops=stops,
            banned=tuple(sorted(t for t in banned if 0 <= t < limits.vocab)),
            chain=Chain(request, limits.block_size),
            seq=self._keys,
            positions=positions,
            arrived=now,
            prompt_scores=[None] * len(request.tokens) if p.prompt_logprobs is not None and index == 0 else None,
        )

    def _refuse(self, request: Request, status: int, message: str) -> None:
        for i in range(request.params.n):
            self._outbox.append(Delta(request.id, i, finish="error", status=status, message=message))

    def media(self, request_id: str, index: int, pixels: UInt8) -> None:
        """Pixels uint8 [patches, 1176] that were asked for; ignored where the request is gone."""
        family = self.requests.get(request_id)
        if family:
            self.scheduler.desk.arrived(family[0].key_of(family[0].request.spans[index]), pixels)

    def fail(self, request_id: str, status: int, message: str) -> None:
        """Ends all choices of a request with an error."""
        for c in self.requests.get(request_id, []):
            self._finish(c, "error", status=status, message=message)
        self._settle()

    def abort(self, request_id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it, as no longer wanted."""
        for c in self.requests.get(request_id, []):
            if choice in (-1, c.index):
                self._finish(c, "abort")
        self._settle()

    def fail_all(self, status: int, message: str) -> None:
        """Ends everything, after a device error."""
        for request_id in list(self.requests):
            self.fail(request_id, status, message)

    # Out

    def update(self, output: StepOutput) -> None:
        """Takes in what a step produced: tokens arrive, choices end, blocks come back."""
        flight = self.scheduler.flights.popleft()
        assert flight.number == output.number, "steps come back in order"
        self._account(flight, output)
        for key, scores in output.targets.items():
            self._score(self.choices.get(key), scores)
        for c in flight.named:
            c.inflight -= 1
            row = output.samples.get(c.key)
            if row is not None and output.head is not None:
                self._token(c, output.head, row)
            elif c.limit == 0 and c.where is SequenceStatus.RUNNING and c.computed == c.prompt and c.inflight == 0:
                self._finish(c, "length")
            if c.where is SequenceStatus.RUNNING:
                self.scheduler.publish(c)
            elif c.where is SequenceStatus.LEAVING and c.inflight == 0:
                self.scheduler.release(c)
        self._settle()

    def _account(self, flight: InFlightStep, output: StepOutput) -> None:
        """What the step's launches mean for the statistics of its choices."""
        launches, misses = len(output.stats), sum(not s.planned for s in output.stats)
        for c in flight.named:
            c.stats.launches += launches
            c.stats.misses += misses
        if flight.encoded:
            seconds = sum(s.seconds for s in output.stats if s.bucket.stage is Stage.VISION)
            for c in {c.key: c for c in flight.encoded}.values():
                c.stats.encode += seconds

    def _token(self, c: Sequence, head: HeadOutput, row: int) -> None:
        token = int(head.token[row])
        c.resolve(token)
        if c.ended:
            return  # by an earlier token or an abort, while this one was in flight
        delta = self._delta(c)
        delta.tokens.append(token)
        self.generation_tokens += 1
        if not c.first:
            c.first = self.scheduler.clock()
        wanted = c.request.params.logprobs
        if wanted is not None:
            delta.logprobs = [*(delta.logprobs or []), _logprob(head, row, token, wanted)]
        produced = c.known() - c.prompt
        if token in c.stops:
            self._finish(c, "stop", stop_token=None if token in self.scheduler.limits.eos else token)
        elif produced >= c.limit:
            self._finish(c, "length")

    def _delta(self, c: Sequence) -> Delta:
        if c.delta is None:
            c.delta = Delta(c.request.id, c.index)
            self._touched.append(c)
            if c.known() - c.prompt <= 1:
                c.delta.cached_tokens = c.stats.cached_tokens
                if c.prompt_scores is not None:
                    c.delta.prompt_logprobs = c.prompt_scores
        return c.delta

    def _finish(
        self, c: Sequence, reason: str, stop_token: int | None = None, status: int = 0, message: str = ""
    ) -> None:
        if c.ended:
            return
        delta = self._delta(c)
        delta.finish, delta.stop_token, delta.status, delta.message = reason, stop_token, status, message
        delta.stats = self._stats(c)
        c.ended = True
        for child in c.family:
            if not child.ended:  # it waited for this one's prompt; now it computes its own
                self.scheduler.enqueue(child)
        c.family = []
        if c.where is SequenceStatus.RUNNING:
            self.scheduler.leave(c)
        elif c.where is SequenceStatus.LEAVING:
            c.requeue = False
        else:
            if c in self.scheduler.waiting:
                self.scheduler.waiting.remove(c)
            c.where = SequenceStatus.DONE

    def _stats(self, c: Sequence) -> RequestStats:
        now = self.scheduler.clock()
        entered = c.entered or now
        first = c.first or now
        c.stats.queue = entered - c.arrived
        c.stats.prefill = first - entered
        c.stats.decode = now - first
        return c.stats

    def _score(self, c: Sequence | None, scores: TargetScores) -> None:
        if c is None or c.prompt_scores is None:
            return
        wanted = c.request.params.prompt_logprobs or 0
        for row, position in enumerate(scores.positions):
            c.prompt_scores[position] = _logprob(scores.head, row, int(scores.head.token[row]), wanted)

    def _settle(self) -> None:
        """Moves finished and touched deltas to the outbox and forgets requests whose choices have all ended."""
        for c in self._touched:
            if c.delta is not None:
                self._outbox.append(c.delta)
                c.delta = None
        self._touched = []
        for request_id in [r for r, f in self.requests.items() if all(c.ended for c in f)]:
            family = self.requests.pop(request_id)
            keys = {family[0].key_of(s) for s in family[0].request.spans}
            wanted = {c.key_of(s) for f in self.requests.values() for c in f[:1] for s in c.request.spans}
            self.scheduler.desk.gone(request_id, keys, wanted)
            for c in family:
                self.choices.pop(c.key, None)

    def collect(self) -> list[Delta]:
        """Deltas since the last call."""
        out, self._outbox = self._outbox, []
        return out


def _logprob(head: HeadOutput, row: int, token: int, wanted: int) -> TokenLogprob:
    assert head.logprob is not None and head.rank is not None
    assert head.top_id is not None and head.top_logprob is not None
    return TokenLogprob(
        token,
        float(head.logprob[row]),
        int(head.rank[row]),
        head.top_id[row, :wanted].tolist(),
        head.top_logprob[row, :wanted].tolist(),
    )
