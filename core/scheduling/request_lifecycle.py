"""Starts and ends requests, and delivers a step's results to them. Each sequence ends exactly once."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np

from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.pooling_description import ALL, MEAN
from trencadis.core.graph_and_bucket_learning_report import SKIP, UNPLANNED, WARMING
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.media_spans import rows_at_once
from trencadis.core.request import Delta, Request
from trencadis.core.scheduling.beam_search import BeamGroup
from trencadis.core.scheduling.draft_scheduler import drop_surplus_blocks
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus, positions_in, shared_union
from trencadis.core.scheduling.step_builder_and_adapter_slots import (
    InFlightStep,
    logprob_of,
    publish_filled,
    report_token,
)
from trencadis.core.shapes.step_times_and_chunk_budget import StepWork
from trencadis.core.step import UInt8
from trencadis.core.step_output import HeadOutput, Pooled, StepOutput, TargetScores, append_pooled


class Lifecycle:
    """Owns the sequences of live requests; the scheduler decides which of them run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, list[Sequence]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.totals = scheduler.totals
        self._keys = 0
        self._outbox: list[Delta] = []
        self._touched: list[Sequence] = []
        self._beams: dict[str, BeamGroup] = {}
        self._drew: dict[str, BeamGroup] = {}  # groups with a beam that has sampled since the last step
        self._ended: dict[str, None] = {}  # requests with a choice that has ended since the last call of ``_settle``
        self._media: Counter[str] = Counter()  # live requests that hold each image, by arena key

    # Input

    def add(self, request: Request) -> None:
        """Queues a request; one that can never run ends at once with an error Delta for each choice."""
        limits = self.scheduler.limits
        if request.id in self.requests:
            self.refuse(request, 400, f"request id {request.id!r} is in use")
            return
        output_limit = limits.max_model_len - len(request.tokens)
        if bool(request.pool) != limits.pooling:
            self.refuse(request, 400, "this engine pools" if limits.pooling else "this engine generates")
            return
        scoring = request.params.max_tokens == 0 or limits.pooling
        if not request.tokens or output_limit < (0 if scoring else 1):
            held = len(request.tokens)
            self.refuse(request, 400, f"the prompt of {held} tokens leaves no room in {limits.max_model_len}")
            return
        if request.spans and rows_at_once(request.spans) > (rows := self.scheduler.arena.capacity):
            self.refuse(request, 413, f"an image needs more than the {rows} rows of the image arena")
            return
        now = self.scheduler.clock()
        request.arrival = request.arrival or now
        sequences = [self._make(request, i, output_limit, now) for i in range(request.params.n)]
        self.requests[request.id] = sequences
        self.sequences.update((seq.key, seq) for seq in sequences)
        if request.spans:
            self._note_media(sequences[0])
        if request.beams is not None:
            self._beams[request.id] = BeamGroup(request.beams, sequences)
        else:
            sequences[0].siblings = sequences[1:]
        self.scheduler.enqueue(sequences[0])

    def _make(self, request: Request, index: int, output_limit: int, now: float) -> Sequence:
        limits, p = self.scheduler.limits, request.params
        self._keys += 1
        grammar = request.rule is not None and bool(request.rule.grammar)
        endless = p.ignore_eos and not grammar  # a finished grammar ends the choice
        stops = tuple(p.stop_token_ids)
        limit = 0 if request.pool else output_limit if p.max_tokens is None else min(output_limit, p.max_tokens)
        seed = p.seed if p.seed is not None else zlib.crc32(request.id.encode()) ^ (limits.seed * 0x9E3779B1)
        made = Sequence(
            key=self._keys,
            request=request,
            index=index,
            seed=seed,
            tokens=list(request.tokens),
            limit=limit,
            most=len(request.tokens) + limit,
            plain=request.rule is None and p.logprobs is None,
            stops=shared_union(stops, () if endless else limits.eos),
            banned=tuple(sorted(t for t in shared_union(stops, limits.eos) if 0 <= t < limits.vocab)),
            eos=tuple(t for t in limits.eos if 0 <= t < limits.vocab),
            unending=p.ignore_eos and grammar,
            block_hashes=BlockHashChain(request, limits.block_size),
            positions=None if request.positions is None else positions_in(request.positions),
            arrived=now,
            prompt_scores=[None] * len(request.tokens) if p.prompt_logprobs is not None and index == 0 else None,
        )
        if self.scheduler.drafting is not None and made.masked and request.beams is None:
            made.forces = self.scheduler.drafting.count_forced(made)
        return made

    def refuse(self, request: Request, status: int, message: str) -> None:
        """Sends an error Delta for each choice of a request that was not queued."""
        for i in range(request.params.n):
            self._outbox.append(Delta(request.id, i, finish="error", status=status, message=message))

    def add_media(self, request_id: str, index: int, pixels: UInt8) -> None:
        """Takes requested uint8 pixels, flat or [slots, values]; ignores them if the request has ended."""
        values = self.scheduler.limits.slot_values
        if values and pixels.size % values:
            self.fail(request_id, 500, "The image's pixels are incomplete.")
            return
        pixels = pixels.reshape(-1, values) if values else pixels
        sequences = self.requests.get(request_id)
        if sequences:
            first = sequences[0]
            self.scheduler.pixel_queue.receive(first.key_of(first.request.spans[index]), pixels)

    def fail(self, request_id: str, status: int, message: str) -> None:
        """Ends all sequences of a request with an error."""
        for seq in self.requests.get(request_id, []):
            self._fail(seq, status, message)
        self._settle()

    def abort(self, request_id: str, choice: int = -1) -> None:
        """Aborts a request, or one choice of it."""
        for seq in self.requests.get(request_id, []):
            if choice in (-1, seq.index) or seq.mates:
                self._finish(seq, "abort")
        self._settle()

    def fail_all(self, status: int, message: str) -> None:
        """Ends all requests with an error, after the device failed."""
        for request_id in list(self.requests):
            self.fail(request_id, status, message)

    # Output

    def update(self, output: StepOutput) -> None:
        """Processes a step's results: stores tokens, ends sequences, frees blocks."""
        step = self.scheduler.in_flight.popleft()
        assert step.number == output.number, "steps come back in order"
        buckets = self._account(step, output)
        if step.snapshots and self.scheduler.states is not None:
            self.scheduler.states.pool.publish(step.snapshots)
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.learn(step, self.scheduler.clock())
        if step.work is not None:
            self._learn(step.work, output)
        if output.targets or output.pooled:
            self._of_prompts(output)
        if step.persistent:
            self._take_persistent(step.persistent, output, buckets)
            if self.scheduler.in_flight:  # the last token of a block that the next step fills is now known
                publish_filled(self.scheduler.in_flight[0].filled, self.scheduler.limits, self.scheduler.pool)
        for seq in step.scheduled:
            seq.inflight -= 1
            row = output.samples.get(seq.key)
            if row is not None and output.head is not None:
                (self._take_beam if seq.mates else self._take_tokens)(seq, output, output.head, row)
            elif seq.scored:
                self._finish_prompt_only(seq)
            if seq.status is SequenceStatus.RUNNING:
                self.scheduler.publish(seq)
            elif seq.status is SequenceStatus.LEAVING and seq.inflight == 0:
                self.scheduler.release(seq)
        if self._drew:
            self._advance_beams()
        if self._touched or self._ended:
            self._settle()

    def _learn(self, work: StepWork, output: StepOutput) -> None:
        """Records how long a step took."""
        assert self.scheduler.times is not None
        regular = all(s.miss not in (UNPLANNED, SKIP, WARMING) for s in output.stats)
        self.scheduler.times.learn(work, self.scheduler.clock(), regular)

    def _of_prompts(self, output: StepOutput) -> None:
        """Processes scores of prompt tokens, and pooled rows."""
        for key, scores in output.targets.items():
            self._score(self.sequences.get(key), scores)
        for key, values in output.pooled.items():
            self._add_pooled(self.sequences.get(key), values)

    def _advance_beams(self) -> None:
        drew, self._drew = self._drew, {}
        for group in drew.values():
            if not group.advance(self.scheduler):
                self._send_beams(group)

    def _add_pooled(self, seq: Sequence | None, values: Pooled) -> None:
        """Adds a chunk's rows; ignored if the sequence was preempted, because it then recomputes its prompt."""
        if seq is not None and seq.status is SequenceStatus.RUNNING:
            seq.pooled = append_pooled(seq.pooled, values, seq.request.pool == ALL)

    def _count_prompt(self, seq: Sequence) -> None:
        """Counts the prompt of a request once, with its first choice."""
        if seq.index == 0:
            self.totals.prompt_tokens += seq.prompt
            self.totals.prompt_cached += min(seq.stats.cached_tokens, seq.prompt)

    def _finish_prompt_only(self, seq: Sequence) -> None:
        """Finishes a sequence that generates nothing once its whole prompt is computed."""
        self._count_prompt(seq)
        if not seq.request.pool:
            self._finish(seq, "length")
            return
        count = seq.prompt if seq.request.pool == MEAN else 1
        values = None if seq.pooled is None else (seq.pooled / count).astype("<f4")
        if values is None or not np.isfinite(values).all():
            self._fail(seq, 500, "the model gave values that are no finite numbers")
            return
        delta = self._delta(seq)
        delta.pooled, delta.cached_tokens = values.tobytes(), seq.stats.cached_tokens
        self._finish(seq, "stop")

    def _account(self, step: InFlightStep, output: StepOutput) -> tuple[Bucket, ...]:
        """Adds the step's launches to the statistics of its sequences, but not of those in the persistent batch."""
        held: list[Bucket] = []
        misses = 0
        for launch in output.stats:
            held.append(launch.bucket)
            misses += not launch.planned
        buckets, launches = tuple(held), len(held)
        for seq in step.scheduled:
            seq.stats.launches += launches
            seq.stats.misses += misses
            seq.first_buckets = seq.first_buckets or buckets
            seq.last_buckets = buckets
        for seq in step.persistent if misses else ():
            seq.stats.misses += misses
        if step.encoded:
            self._account_images(step.encoded, output)
        return buckets

    def _account_images(self, encoded: list[Sequence], output: StepOutput) -> None:
        """Adds the seconds of the step's VISION launches to each sequence whose images they held."""
        seconds = sum(s.seconds for s in output.stats if s.bucket.stage is Stage.VISION)
        for seq in {seq.key: seq for seq in encoded}.values():
            seq.stats.encode += seconds

    def _take_tokens(self, seq: Sequence, output: StepOutput, head: HeadOutput, row: int) -> None:
        """Takes what was drawn for a sequence: one token, the accepted ones of its drafts, and those that are forced
        after them.
        """
        drafts, seq.drafts = seq.drafts, ()
        self._take_token(seq, output, head, row)
        accepted = 0
        while accepted < len(drafts) and not seq.ended and seq.tokens[-1] == drafts[accepted]:
            accepted += 1
            seq.accept_draft()
            self._take_token(seq, output, head, row + accepted, accepted)
        if drafts and self.scheduler.drafting is not None:
            self.scheduler.drafting.note(seq, len(drafts), accepted)
            drop_surplus_blocks(seq, self.scheduler.pool, self.scheduler.limits.block_size)
        for place, token in enumerate(output.forced.get(seq.key, ()), accepted + 1):
            if seq.ended:
                break
            seq.append_forced(token)
            self._count_token(seq, token)
            self._end_at(seq, token, token in seq.stops and (seq.key, place) not in output.text)

    def _take_token(self, seq: Sequence, output: StepOutput, head: HeadOutput, row: int, place: int = 0) -> None:
        """Takes the token of row ``row``, which was drawn after ``place`` drafts."""
        token = int(head.token[row])
        seq.resolve(token)
        if seq.ended:
            return  # by an earlier token or an abort, while this one was in flight
        if seq.key in output.failures and output.failed_at.get(seq.key, 0) == place:
            self._fail(seq, 500, output.failures[seq.key])
            return
        delta = self._count_token(seq, token)
        if seq.request.params.reports:
            delta.logprobs = [*(delta.logprobs or []), report_token(seq, head, row, token, output.scored.get(seq.key))]
        self._end_at(seq, token, token in seq.stops and (seq.key, place) not in output.text)

    def _count_token(self, seq: Sequence, token: int) -> Delta:
        """Adds a token to the outgoing Delta, which is returned, and to the counters."""
        delta = self._delta(seq)
        delta.tokens.append(token)
        self.totals.generation_tokens += 1
        if not seq.first:
            self._count_prompt(seq)
            seq.first = self.scheduler.clock()
            if seq.siblings:  # with recurrent layers, choices begin with a snapshot of the prompt
                self._detach_siblings(seq)
        return delta

    def _end_at(self, seq: Sequence, token: int, stops: bool) -> None:
        """Ends a sequence if ``token``, its last one, is the end; ``stops``: True if the token ends it."""
        produced = seq.count_known() - seq.prompt
        if stops:
            self._finish(seq, "stop", stop_token=None if token in self.scheduler.limits.eos else token)
        elif produced >= seq.limit:
            self._finish(seq, "length")
        elif seq.request.rule is not None and seq.repeats(seq.request.rule.repetition):
            self._finish(seq, "repetition")

    def _take_persistent(self, sequences: list[Sequence], output: StepOutput, buckets: tuple[Bucket, ...]) -> None:
        """Does the work of ``_take_token`` and of the end of a step for sequences of the persistent batch.

        Their samples come first in the output. Most sequences simply continue.
        """
        head, launches, leaving = output.head, len(buckets), SequenceStatus.LEAVING
        assert head is not None
        for row, (seq, token) in enumerate(zip(sequences, head.token[: len(sequences)].tolist(), strict=True)):
            seq.inflight -= 1
            seq.stats.launches += launches
            seq.last_buckets = buckets
            at = len(seq.tokens) - seq.pending
            if at + 1 < seq.most and seq.plain and token not in seq.stops and not seq.ended:
                seq.tokens[at] = token
                seq.pending -= 1
                self.totals.generation_tokens += 1
                self._outbox.append(Delta(seq.request.id, seq.index, [token]))
            else:
                self._take_token(seq, output, head, row)
            if seq.status is leaving and seq.inflight == 0:
                self.scheduler.release(seq)

    def _take_beam(self, seq: Sequence, output: StepOutput, head: HeadOutput, row: int) -> None:
        if seq.ended:
            return
        group = self._drew[seq.request.id] = self._beams[seq.request.id]
        group.take(seq, head, row)
        if not seq.first:
            self._count_prompt(seq)
            seq.first = self.scheduler.clock()
            if seq.siblings:  # with recurrent layers, choices begin with a snapshot of the prompt
                self._detach_siblings(seq)

    def _send_beams(self, group: BeamGroup) -> None:
        """Sends the answers of a finished beam search."""
        prompt = group.sequences[0]
        for seq, found in ((end.sequence, end.found) for end in group.ends()):
            delta = self._delta(seq)
            items = [] if found is None else found.beam.items()
            delta.tokens = [item.token for item in items]
            delta.cached_tokens = prompt.stats.cached_tokens
            if seq.request.params.reports:
                delta.logprobs = items
            self.totals.generation_tokens += len(items)
            seq.entered, seq.first = prompt.entered, prompt.first
            stop = None if found is None else found.stop
            stop_token = None if stop in self.scheduler.limits.eos else stop
            self._finish(seq, "length" if stop is None else "stop", stop_token=stop_token)

    def _delta(self, seq: Sequence) -> Delta:
        if seq.delta is None:
            seq.delta = Delta(seq.request.id, seq.index)
            self._touched.append(seq)
            if seq.count_known() - seq.prompt <= 1:
                seq.delta.cached_tokens, seq.delta.prompt_logprobs = seq.stats.cached_tokens, seq.prompt_scores
        return seq.delta

    def _fail(self, seq: Sequence, status: int, message: str) -> None:
        """Ends a sequence with an error."""
        if not seq.ended:
            delta = self._delta(seq)
            delta.status, delta.message = status, message
            self._finish(seq, "error")

    def _finish(self, seq: Sequence, reason: str, stop_token: int | None = None) -> None:
        if seq.ended:
            return
        delta = self._delta(seq)
        delta.finish, delta.stop_token = reason, stop_token
        delta.stats = seq.ended_at(self.scheduler.clock())
        seq.ended = True
        self._ended[seq.request.id] = None
        if self.scheduler.fair is not None:
            self.scheduler.fair.note_ended(seq)
        if seq.siblings:
            self._detach_siblings(seq)
        if seq.status is SequenceStatus.RUNNING:
            self.scheduler.leave(seq)
        else:
            self._withdraw(seq)

    def _withdraw(self, seq: Sequence) -> None:
        """Prevents a sequence that has ended from running again."""
        if seq.status is SequenceStatus.LEAVING:
            seq.requeue = False
        else:
            self.scheduler.order.remove(seq, self.scheduler.waiting)
            seq.status = SequenceStatus.DONE

    def _detach_siblings(self, seq: Sequence) -> None:
        """Queues the siblings that wait for the prompt of ``seq``, so that they compute it themselves."""
        for sibling in seq.siblings:
            if not sibling.ended:
                self.scheduler.enqueue(sibling)
        seq.siblings = []

    def _score(self, seq: Sequence | None, scores: TargetScores) -> None:
        if seq is None or seq.prompt_scores is None:
            return
        wanted = seq.request.params.prompt_logprobs or 0
        for row, position in enumerate(scores.positions):
            seq.prompt_scores[position] = logprob_of(scores.head, row, int(scores.head.token[row]), wanted)

    def _settle(self) -> None:
        """Moves finished and touched deltas to the outbox and forgets requests whose sequences have all ended."""
        for seq in self._touched:
            if seq.delta is not None:
                self._outbox.append(seq.delta)
                seq.delta = None
        self._touched = []
        ended, self._ended = self._ended, {}
        for request_id in ended:
            if all(seq.ended for seq in self.requests[request_id]):
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Forgets a request whose choices have all ended."""
        sequences = self.requests.pop(request_id)
        self._beams.pop(request_id, None)
        if sequences[0].request.spans:
            self._forget_media(sequences[0])
        for seq in sequences:
            self.sequences.pop(seq.key, None)

    def _note_media(self, first: Sequence) -> None:
        """Counts the images of a new request."""
        self.scheduler.with_media += 1
        self._media.update({first.key_of(span) for span in first.request.spans})

    def _forget_media(self, first: Sequence) -> None:
        """Drops the images of a request, unless another one uses them."""
        self.scheduler.with_media -= 1
        keys = {first.key_of(span) for span in first.request.spans}
        for key in keys:
            self._media[key] -= 1
            if not self._media[key]:
                del self._media[key]
        self.scheduler.pixel_queue.forget_request(first.request.id, keys, self._media.keys())

    def collect(self) -> list[Delta]:
        """Returns the Deltas since the last call."""
        out, self._outbox = self._outbox, []
        return out
