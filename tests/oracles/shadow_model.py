"""A rank that runs Steps over a shadow model: integers instead of tensors, but real blocks, slots and arena rows.

Each token's KV is a number made from its id (or its image row's content) and its position; the next token is a function
of all KV before it, read through the block table. Any block that is shared wrongly, reused too early or left stale, any
arena row overwritten before it is read, any token read from the wrong slot changes the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tests.traffic.rule_oracle import SIXTY
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launch_inputs import HeadInputs
from trencadis.core.launches.greedy_and_masked_sample_launches import LaunchedHead, launch_masked
from trencadis.core.launches.host_inputs import SampleRow, head_inputs
from trencadis.core.launches.rank_input_batch import RankInputBatch
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Request
from trencadis.core.scheduling.sequence import uniform
from trencadis.core.step import PENDING, BlockMove, Opening, Row, Sample, Step
from trencadis.core.step_output import HeadOutput, StepOutput, TargetScores
from trencadis.core.token_masks.matcher_manager import MatcherManager

MASK = (1 << 63) - 1
CONSTANT = 4711
"""Content of the one constant row of the arena."""
SHADOW_RESERVED = RESERVED_ROWS + 1


def mix(*values: int) -> int:
    """A 63-bit hash."""
    h = 0x9E3779B97F4A7C15
    for v in values:
        h = ((h ^ (v & MASK)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & ((1 << 64) - 1)
        h ^= h >> 29
    return h & MASK


def image_value(digest: str, index: int) -> int:
    """Content of one arena row."""
    return mix(int(digest, 16), index)


def kv_value(content: int, position: tuple[int, ...]) -> int:
    """KV of one token."""
    return mix(content, *position)


Bias = tuple[tuple[int, float], ...]


def draw(total: int, allowed: Sequence[bool], sample: Sample, counts: dict[int, int], bias: Bias) -> int:
    """The next token: a function of everything computed, the uniform number, the bias and, if penalised, the counts.

    ``allowed``: of each id of the vocabulary, whether it may be drawn.
    """
    vocab = len(allowed)
    state = sum(mix(k, v) for k, v in counts.items()) if sample.presence else 0
    state += sum(mix(k, int(v)) for k, v in bias)
    token = mix(total, int(sample.uniform * (1 << 23)), state) % vocab
    while not allowed[token]:
        token = (token + 1) % vocab
    return token


def best_ids(total: int, vocab: int) -> tuple[list[int], list[float]]:
    """The 20 likeliest ids, a function of everything computed, and their log-probabilities as float32 has them."""
    first, stride = mix(total, 1) % vocab, 7
    ids = [(first + stride * i) % vocab for i in range(20)]
    steps = np.array([mix(total, 2, i) % 1000 + 1 for i in range(20)], np.float32) / 1000
    return ids, (-steps.cumsum(dtype=np.float32)).tolist()


RowState = tuple[int, int, int, list[int]]
"""Key, slot, context and blocks of a persistent row."""


def states_of(batch: RankInputBatch) -> list[RowState]:
    """Returns the state of each row of a rank's batch."""
    numbers = batch._numbers[:5, : batch.count].T.tolist()
    return [
        (key, slot, context, batch._table[i, :held].tolist())
        for i, (key, (slot, context, _, _, held)) in enumerate(zip(batch._keys, numbers, strict=True))
    ]


def expand_step(batch: RankInputBatch, step: Step) -> Step:
    """Applies the changes of ``step`` to ``batch``; returns it with one ``Row`` for everything that runs."""
    batch.apply(step.batch)
    whole = batch.with_all_rows(step)
    if step.batch is not None:
        batch.advance(step.rows, step.batch.joins)
    return whole


@dataclass
class ShadowRank:
    """Executes Steps; ``vocab`` ids, tables sized by blocks, rows and slots."""

    blocks: int
    block_size: int
    rows: int
    slots: int
    vocab: int
    steps: int = 0
    largest_images: int = 0
    kv: dict[int, list[int | None]] = field(default_factory=dict)
    arena: dict[int, int] = field(default_factory=lambda: {SHADOW_RESERVED - 1: CONSTANT})
    last: dict[int, int] = field(default_factory=dict)
    counts: dict[int, dict[int, int]] = field(default_factory=dict)
    bias: dict[int, Bias] = field(default_factory=dict)
    matchers: MatcherManager = field(default_factory=lambda: MatcherManager(0))
    openings: dict[int, Opening] = field(default_factory=dict)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    """What was drawn for each handle, behind its end too."""
    host_blocks: int = 0
    host: dict[int, list[int | None]] = field(default_factory=dict)
    stored: int = 0
    restored: int = 0
    computed: int = 0
    stages: int = 1
    """Pipeline stages that it stands for: no token may be PENDING then."""
    lanes: dict[int, RankInputBatch] = field(default_factory=lambda: defaultdict(RankInputBatch))
    expected_rows: dict[int, list[RowState]] = field(default_factory=dict)
    """State of the scheduler's rows by Step."""
    """What the scheduler knows of the batch behind each Step, if somebody asked it."""
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Recurrent state by slot: tokens read so far, and their total."""
    host_states: dict[int, tuple[int, int]] = field(default_factory=dict)
    host_state_slots: int = 0

    def execute(self, step: Step) -> ShadowPending:
        """Runs a Step at once."""
        assert step.rows or step.images or step.persistent_count, "a Step that does nothing was issued"
        assert 0 <= step.micro_batch < self.stages
        batch = self.lanes[step.micro_batch]
        batch.apply(step.batch)
        listed = (*batch.rows(), *step.rows)
        assert self.stages == 1 or all(PENDING not in row.tokens for row in listed), "the first stage lacks a token"
        self.steps += 1
        for move in step.moves:
            self._move(move)
        for move in step.state_moves:
            self._move_state(move)
        self.matchers.apply(step.closings, step.openings)
        self.openings.update((o.key, o) for o in step.openings)
        for reset in step.resets:
            tally: dict[int, int] = {}
            for t in reset.output:
                tally[t] = tally.get(t, 0) + 1
            self.counts[reset.slot], self.bias[reset.slot] = tally, reset.bias
        written: set[int] = set()
        for image in step.images:
            assert not written & set(image.rows.tolist()), "two images of one launch share rows"
            written |= set(image.rows.tolist())
            for i, row in enumerate(image.rows):
                assert SHADOW_RESERVED <= row < self.rows
                self.arena[int(row)] = image_value(image.digest.split("\0")[-1], i)
        out = StepOutput(step.number)
        draws: list[tuple[int, int, Sample]] = []
        ahead: list[tuple[int, ...]] = []
        begun = self._read_states(listed)
        for row in listed:
            totals = self._row(row, begun.get(row.key))
            for key, slot, sample, after in row.samples:
                out.samples.setdefault(key, len(draws))
                draws.append((totals[-1 - after], slot, sample))
                count, drafts = len(row.tokens), row.samples[0].tokens_after
                ahead.append(row.tokens[count - drafts : count - after])
            if row.targets is not None:
                at = [i for i, t in enumerate(row.targets) if t >= 0]
                zeros = np.zeros((len(at), 20))
                scores = np.array([totals[i] % 1000 for i in at], np.float32)
                ids = np.array([row.targets[i] for i in at], np.int32)
                head = HeadOutput(ids, scores, ids, zeros.astype(np.int32), zeros.astype(np.float32))
                out.targets[row.key] = TargetScores([row.context + i + 1 for i in at], head)
        rows = [SampleRow(i, slot, sample, ahead[i]) for i, (_, slot, sample) in enumerate(draws)]

        def launch(inputs: HeadInputs) -> ShadowHead:
            return self._head(draws, ahead, inputs)

        if any(sample.handle for _, _, sample in draws):
            launched = launch_masked(rows, self.vocab, self.matchers, launch)
        else:
            launched = LaunchedHead(launch(head_inputs(rows, self.vocab)))
        if step.batch is not None:
            batch.advance(step.rows, step.batch.joins)
        assert self.expected_rows.pop(step.number, None) in (None, states_of(batch)), "the rank's batch went astray"
        return ShadowPending(out, launched)

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        self.matchers.grammars.set_vocabulary(data)

    def prepare(self, grammar: str) -> Future[str]:
        return self.matchers.grammars.prepare(grammar)

    def _head(
        self, draws: list[tuple[int, int, Sample]], ahead: list[tuple[int, ...]], inputs: HeadInputs
    ) -> ShadowHead:
        masks = [[True] * self.vocab]
        if len(inputs.masks) > 1:
            masks += np.unpackbits(inputs.masks[1:], axis=1, bitorder="little", count=self.vocab).tolist()
        tokens = []
        for at, ((total, slot, sample), mask) in enumerate(zip(draws, inputs.mask_row.tolist(), strict=True)):
            tally = self.counts.setdefault(slot, {})
            drafts = ahead[at]
            if list(drafts) != tokens[at - len(drafts) :]:  # a draft before it is rejected: nothing may be read of it
                tokens.append(self.vocab - 1)
                continue
            token = draw(total, masks[mask], sample, tally, self.bias.get(slot, ()))
            self.last[slot] = token
            if sample.full:
                tally[token] = tally.get(token, 0) + 1
            if sample.handle:
                self.drawn.setdefault(sample.handle, []).append(token)
            tokens.append(token)
        r = len(tokens)
        best = [best_ids(total, self.vocab) for total, _, _ in draws]
        return ShadowHead(
            HeadOutput(
                np.array(tokens, np.int32),
                np.zeros(r, np.float32),
                np.ones(r, np.int32),
                np.array([ids for ids, _ in best], np.int32).reshape(r, 20),
                np.array([values for _, values in best], np.float32).reshape(r, 20),
            )
        )

    def _move(self, move: BlockMove) -> None:
        assert RESERVED_BLOCKS <= move.block < self.blocks + RESERVED_BLOCKS and 0 <= move.slot < self.host_blocks
        if move.out:
            cells = self.kv[move.block]
            kept = self.host_state_slots > 0 and cells[0] is not None  # a block in which a kept state ends
            assert kept or None not in cells, "a block goes to host memory before it is full"
            self.host[move.slot] = list(cells)
            self.stored += 1
        else:
            self.kv[move.block] = list(self.host[move.slot])
            self.restored += 1

    def _move_state(self, move: BlockMove) -> None:
        assert move.block > 0 and 0 <= move.slot < self.host_state_slots
        if move.out:
            self.host_states[move.slot] = self.states[move.block]
        else:
            self.states[move.block] = self.host_states[move.slot]

    def _read_states(self, rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
        """The state that each row begins with, by its key; no slot that one row reads is written by another."""
        held = {row.key: row.state for row in rows if row.state is not None}
        writers = {state.slot: key for key, state in held.items()}
        assert len(writers) == len(held) and 0 not in writers, "two rows write one state"
        for key, state in held.items():
            assert writers.get(state.source, key) == key, "a state is read and written in one launch"
        return {key: self.states[s.source] if s.source else (0, 0) for key, s in held.items()}

    def _row(self, row: Row, begun: tuple[int, int] | None = None) -> list[int]:
        size = self.block_size
        self.computed += len(row.tokens)
        assert len(row.blocks) * size >= row.context + len(row.tokens), "a token without a block"
        content = list(row.tokens)
        for i, t in enumerate(content):
            if t == PENDING:
                assert i == len(content) - 1
                content[i] = self.last[row.slot]
        for image in row.images:
            for i, r in enumerate(image.rows):
                content[image.start + i] = self.arena[int(r)]
        for i, value in enumerate(content):
            at = row.context + i
            block = row.blocks[at // size]
            assert RESERVED_BLOCKS <= block < self.blocks + RESERVED_BLOCKS
            cells = self.kv.setdefault(block, [None] * size)
            cells[at % size] = kv_value(value, tuple(int(x) for x in row.positions[:, i]))
        totals, total, first = [], 0, 0
        if begun is not None and row.state is not None:
            first, total = begun
            assert first == row.context, "a row begins with the state of another token"
            earlier = 0
            for at in range(first):
                cell = self.kv[row.blocks[at // size]][at % size]
                assert cell is not None, "a block is read before it was written"
                earlier = (earlier * 31 + cell) & MASK
            assert earlier == total, "a state differs from the blocks before it"
        for at in range(first, row.context + len(content)):
            cell = self.kv[row.blocks[at // size]][at % size]
            assert cell is not None, "a block is read before it was written"
            total = (total * 31 + cell) & MASK
            if at >= row.context:
                totals.append(total)
        if row.state is not None:
            self.states[row.state.slot] = row.context + len(content), total
        return totals


@dataclass
class ShadowHead:
    """What was drawn."""

    output: HeadOutput

    def done(self) -> bool:
        return True

    def result(self) -> HeadOutput:
        return self.output


@dataclass
class ShadowPending:
    """A finished Step."""

    output: StepOutput
    launched: LaunchedHead

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        out, followed = self.output, self.launched.pending_sample
        out.head = self.launched.head.result()
        if followed is not None:
            out.failures, out.failed_at = followed.failures, followed.failed_at
            out.text, out.forced = followed.text, followed.forced
        return out


@dataclass
class Reader:
    """Everything computed over a request's prompt and outputs, alone and without blocks."""

    request: Request

    def __post_init__(self) -> None:
        request = self.request
        self.positions = None
        if request.positions is not None:
            self.positions = np.frombuffer(request.positions, np.int32).reshape(3, len(request.tokens))
        self.prompt = list(request.tokens)
        for span in request.spans:
            for run in span.list_runs():
                for i in range(run.length):
                    own = image_value(span.digest, run.first + i)
                    self.prompt[run.offset + i] = own if run.constant < 0 else CONSTANT

    def read(self, total: int, at: int, content: int) -> int:
        """``total`` with the token at place ``at``."""
        if self.positions is None:
            place: tuple[int, ...] = (at, at, at)
        elif at < len(self.prompt):
            place = tuple(int(x) for x in self.positions[:, at])
        else:
            place = (at + self.request.delta,) * 3
        return (total * 31 + kv_value(content, place)) & MASK

    def start(self) -> int:
        """The total of the prompt."""
        total = 0
        for at, content in enumerate(self.prompt):
            total = self.read(total, at, content)
        return total


def limit_of(request: Request, length: int) -> int:
    room = length - len(request.tokens)
    return room if request.params.max_tokens is None else min(request.params.max_tokens, room)


def beam_oracle(request: Request, eos: tuple[int, ...], vocab: int, length: int) -> list[list[int]]:
    """The answers of a beam search, best first."""
    p, rule, reader, prompt = request.params, request.beams, Reader(request), len(request.tokens)
    assert rule is not None
    limit, stops = limit_of(request, length), set(p.stop_token_ids) | (set() if p.ignore_eos else set(eos))
    beams, done = [(0.0, list[int](), reader.start())], list[tuple[float, list[int]]]()
    for made in range(1, limit + 1):
        grown = []
        for score, output, total in beams:
            for token, value in zip(*best_ids(total, vocab), strict=True):
                if made > p.min_tokens or token not in {*p.stop_token_ids, *eos}:
                    grown.append((score + value, [*output, token], total))
        grown.sort(key=lambda g: -g[0])
        for score, output, _ in grown[: p.n]:
            if output[-1] in stops or made == limit:
                done.append((score / made**rule.length_penalty, output))
        done = sorted(done, key=lambda d: -d[0])[: p.n]
        alive = [(s, o, reader.read(t, prompt + made - 1, o[-1])) for s, o, t in grown if o[-1] not in stops]
        beams = alive[: p.n]
        if len(done) == p.n:
            furthest = limit if rule.early_stopping is None and rule.length_penalty > 0 else made
            if rule.early_stopping or beams[0][0] / furthest**rule.length_penalty <= done[-1][0]:
                break
    return [output for _, output in done]


def oracle(request: Request, choice: int, seed: int, eos: tuple[int, ...], vocab: int, length: int) -> list[int]:
    """What the shadow model answers, computed alone and without blocks. ``length``: the model's longest sequence."""
    return oracle_end(request, choice, seed, eos, vocab, length)[0]


def oracle_end(
    request: Request, choice: int, seed: int, eos: tuple[int, ...], vocab: int, length: int
) -> tuple[list[int], str]:
    """The tokens of ``oracle``, and why they end."""
    p, rule, reader = request.params, request.rule or Rule(), Reader(request)
    content, limit = list(reader.prompt), limit_of(request, length)
    everything = [True] * vocab
    total, output, tally, at = 0, list[int](), dict[int, int](), 0
    while True:
        while at < len(content):
            total = reader.read(total, at, content[at])
            at += 1
        if len(output) >= limit:
            return output, "length"
        sample = Sample(presence=p.presence_penalty, uniform=0.5 if p.greedy else uniform(seed, choice, len(output)))
        may = everything
        if request.rule is not None or len(output) < p.min_tokens:
            allowed = SIXTY.may_draw(rule, p, output)
            may = [t in allowed for t in range(vocab)]
            if not allowed:
                return output, "error"
        token = draw(total, may, sample, tally, tuple((p.logit_bias or {}).items()))
        tally[token] = tally.get(token, 0) + 1
        output.append(token)
        content.append(token)
        reason = SIXTY.over(rule, p, output)
        if reason:
            return output, reason if reason == "stop" or len(output) < limit else "length"
