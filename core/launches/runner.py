"""One rank: Step in, StepOutput out. The runner splits a Step into launches and runs their programs in device order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trencadis.core.backend import Backend, Inputs, Pending
from trencadis.core.buckets import Bucket, Plan, Stage
from trencadis.core.graphs.manager import GraphManager
from trencadis.core.graphs.observer import GraphObserver
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.launches import inputs as host
from trencadis.core.launches.host_blocks import HostKV
from trencadis.core.launches.late_masks import launch_head
from trencadis.core.launches.split import Launch, head_bucket, part_of, pool_rows, sample_bucket, score_rows, split
from trencadis.core.masks.desk import Desk, FollowedDraws
from trencadis.core.models.interface import Model
from trencadis.core.progress import Warming
from trencadis.core.step import (
    HeadInputs,
    HeadOutput,
    PoolOutput,
    Row,
    Step,
    StepInputs,
    StepOutput,
    StepStats,
    TargetScores,
)


@dataclass(slots=True)
class StepPending:
    """A Step in flight: the pending fetches, and which sequence each fetched row belongs to."""

    number: int
    samples: dict[int, int]
    head: Pending[HeadOutput] | None = None
    followed: FollowedDraws | None = None
    targets: list[tuple[int, list[int], Pending[HeadOutput]]] = field(default_factory=list)
    scored: list[tuple[int, list[int], Pending[HeadOutput]]] = field(default_factory=list)
    pools: list[tuple[list[int], Pending[PoolOutput]]] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        scores = (*self.targets, *self.scored)
        pools = all(p.done() for _, p in self.pools)
        return pools and (self.head is None or self.head.done()) and all(p.done() for _, _, p in scores)

    def result(self) -> StepOutput:
        """Waits for the fetches."""
        out = StepOutput(self.number, self.samples, stats=self.stats)
        out.head = self.head.result() if self.head is not None else None
        if self.followed is not None:
            out.failures, out.text = self.followed.failures, self.followed.text
        for some, fetches in ((out.targets, self.targets), (out.scored, self.scored)):
            for key, positions, pending in fetches:
                scores = TargetScores(positions, pending.result())
                some[key] = scores if key not in some else _joined(some[key], scores)
        for keys, sums in self.pools:
            for key, values in zip(keys, sums.result().values, strict=True):
                wide = values.astype(np.float64)
                out.pooled[key] = wide if key not in out.pooled else out.pooled[key] + wide
        return out


class Runner:
    """Executes Steps of one rank on its backend, in order, on one stream."""

    def __init__(self, backend: Backend, model: Model, plan: Plan, observer: GraphObserver | None = None) -> None:
        self.backend = backend
        self.model = model
        self.plan = plan
        self.vocab = model.config.text.vocab
        bodies: dict[str, Callable[[Any], Any]] = {
            "text": model.text,
            "vision": model.vision,
            "greedy": lambda t: model.head(t, False),
            "masked": lambda t: model.masked_head(t),
            "draw": lambda t: model.drawn_head(t),
            "full": lambda t: model.head(t, True),
            "reset": model.reset,
            "pool": model.pool,
        }
        self.graphs = GraphManager(backend, bodies, plan, observer)
        self._warmup: Warmup | None = None
        self.host_kv: HostKV | None = None
        self.desk = Desk(self.vocab, model.config.eos)

    def execute(self, step: Step) -> StepPending:
        """Launches ``step``; the device may still be running it on return."""
        pending = StepPending(step.number, {})
        if step.moves:
            assert self.host_kv is not None
            self.host_kv.run(step.moves)
        self.desk.turn(step.closings, step.openings)
        for launch in split(step, self.plan):
            self._launch(step, launch, pending)
        self._sample(step, pending)
        self._score(step, pending)
        self._pool(step, pending)
        self.graphs.settle()
        return pending

    def warm(self) -> Warming | None:
        """Does one piece of background warm-up; None if none is left."""
        return None if self._warmup is None else self._warmup.advance()

    def warm_by(self, warmup: Warmup) -> None:
        """Takes the warm-up that ``warm`` advances."""
        self._warmup = warmup

    def vocabulary(self, data: bytes | bytearray) -> None:
        """Takes a packed ``core.masks.vocabulary.Vocabulary`` and returns; a thread opens it."""
        self.desk.grammars.vocabulary(data)

    def prepare(self, grammar: str) -> Future[str]:
        """Compiles a grammar in a thread; the result is what is wrong with it, or empty."""
        return self.desk.grammars.prepare(grammar)

    def _launch(self, step: Step, launch: Launch, pending: StepPending) -> None:
        stage = launch.bucket.stage
        inputs: Inputs
        if stage is Stage.RESET:
            resets = [step.resets[i] for i in launch.items]
            inputs, real = host.reset_inputs(resets, self.vocab), len(resets)
        elif stage is Stage.VISION:
            inputs = self.model.pack([step.images[i] for i in launch.items], launch.bucket.dims[0])
            real = int(inputs.count[inputs.rows.reshape(len(inputs.count), -1)[:, 0] > 1].sum())
        else:
            inputs, real = self._text_inputs(step, launch), launch.tokens(step)
        self._run(launch.bucket, inputs, real, pending)
        if stage is Stage.VISION:
            stats = pending.stats[-1]
            stats.items, stats.needed = len(launch.items), sum(step.images[i].slots for i in launch.items)

    def _text_inputs(self, step: Step, launch: Launch) -> StepInputs:
        """Inputs of one text launch; a token's hidden row is its number in the Step, whatever launch computes it."""
        first = [last - len(row.tokens) + 1 for row, last in _last_rows(step.rows)]
        parts = launch.parts(step)
        rows = [part_of(step.rows[p.row], p.start, p.stop, self.plan.block_size) for p in parts]
        return host.text_inputs(rows, [first[p.row] + p.start for p in parts])

    def _run(self, bucket: Bucket, inputs: Inputs, real: int, pending: StepPending) -> Any:
        out, stats = self.graphs.run(bucket, inputs, real)
        pending.stats.append(stats)
        return out

    def _sample(self, step: Step, pending: StepPending) -> None:
        """One SAMPLE over all rows that draw, whichever launches computed them."""
        rows: list[host.SampleRow] = []
        for row, last in _last_rows(step.rows):
            for draw in row.samples:
                pending.samples[draw.key] = len(rows)
                rows.append(host.SampleRow(last, draw.slot, draw.sample))
        if not rows:
            return
        bucket = head_bucket([r.sample for r in rows], self.plan)

        def launch(inputs: HeadInputs) -> Pending[HeadOutput]:
            return self.backend.fetch(self._run(bucket, inputs, len(rows), pending), len(rows))

        pending.head, pending.followed = launch_head(rows, self.vocab, self.desk, launch)
        for key, at in pending.samples.items():
            if rows[at].sample.scored:
                ids = rows[at].sample.scored
                pending.scored += self._scores(key, [rows[at].hidden_row] * len(ids), ids, range(len(ids)), pending)

    def _score(self, step: Step, pending: StepPending) -> None:
        """prompt_logprobs: SAMPLE over slices of the chunk, each token's successor being its target."""
        for row, last in _last_rows(step.rows):
            if row.targets is None:
                continue
            first = last - len(row.tokens) + 1
            wanted = [i for i, t in enumerate(row.targets) if t >= 0]
            hidden, ids = [first + i for i in wanted], [int(row.targets[i]) for i in wanted]
            positions = [row.context + i + 1 for i in wanted]
            pending.targets += self._scores(row.key, hidden, ids, positions, pending)

    def _scores(
        self, key: int, hidden: Sequence[int], ids: Sequence[int], positions: Sequence[int], pending: StepPending
    ) -> list[tuple[int, list[int], Pending[HeadOutput]]]:
        """Launches of SAMPLE that score ``ids`` at rows of the hidden tensor, in slices that a planned bucket holds."""
        made, size = [], score_rows(self.plan)
        for at in range(0, len(ids), size):
            part = slice(at, at + size)
            inputs = host.target_inputs(hidden[part], ids[part], self.vocab)
            count = len(ids[part])
            out = self._run(sample_bucket(count, True, self.plan), inputs, count, pending)
            made.append((key, list(positions[part]), self.backend.fetch(out, count)))
        return made

    def _pool(self, step: Step, pending: StepPending) -> None:
        """POOL over slices of the tokens that pooling requests take, whichever launches computed them."""
        taken = [
            (last - len(row.tokens) + 1 + at, row.key)
            for row, last in _last_rows(step.rows)
            if row.pool is not None
            for at in range(*row.pool)
        ]
        size = pool_rows(self.plan)
        for start in range(0, len(taken), size):
            part = taken[start : start + size]
            number: dict[int, int] = {}
            groups = [number.setdefault(key, len(number) + 1) for _, key in part]
            bucket = self.plan.fit(Stage.POOL, (len(part),))
            out = self._run(bucket, host.pool_inputs([at for at, _ in part], groups), len(part), pending)
            pending.pools.append(([*number], self.backend.fetch(out, len(number))))


def _last_rows(rows: tuple[Row, ...]) -> list[tuple[Row, int]]:
    """Each row with the hidden row of its last token; ``text_inputs`` numbers hidden rows from 1."""
    found, end = [], 0
    for row in rows:
        end += len(row.tokens)
        found.append((row, end))
    return found


def _joined(a: TargetScores, b: TargetScores) -> TargetScores:
    """Scores of two slices of one chunk."""

    def cat(x: Any, y: Any) -> Any:
        return None if x is None or y is None else np.concatenate([x, y])

    head = HeadOutput(
        cat(a.head.token, b.head.token),
        cat(a.head.logprob, b.head.logprob),
        cat(a.head.rank, b.head.rank),
        cat(a.head.top_id, b.head.top_id),
        cat(a.head.top_logprob, b.head.top_logprob),
    )
    return TargetScores(a.positions + b.positions, head)
