"""Learns the shapes of an engine from its traffic: records, proposes, has proposals judged, and keeps a profile.

The engine's thread calls ``tick`` before each step. A search takes two seconds and the pricing of a proposal half of
one; both run in a process of their own (``bucket_search_process``), for which a thread waits, and files are written by
a thread. A proposal is judged by traffic that came after it, unless ``force`` is given; then ``pending`` has the
buckets that the engine is to change to. A change whose launches take longer than predicted is taken back.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.engine.bucket_search_process import (
    Answer,
    FoundBuckets,
    LearnTask,
    PriceTask,
    SearchFailed,
    Task,
    solve_in_child,
)
from trencadis.core.errors import StartupError
from trencadis.core.graph_and_bucket_learning_report import (
    FAILURE,
    PROPOSED,
    PUBLISHED,
    REVERTED,
    LearnedChange,
    LearningReport,
    NeedReport,
    ProposedPlan,
)
from trencadis.core.shapes import plan_change_rules
from trencadis.core.shapes.bucket_profile import merge_into_profile
from trencadis.core.shapes.launch_costs import Costs
from trencadis.core.shapes.measured_launch_times import (
    LEAST_LAUNCHES,
    BucketTimes,
    LaunchTime,
    LaunchTimes,
    MeasuredCosts,
    Residual,
)
from trencadis.core.shapes.plan_change_rules import HORIZON_SECONDS, ChangeGuard, ChangeRate, PlanCosts
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES
from trencadis.core.shapes.shape_need_recorder import PERIOD_SECONDS, NeedRecorder

log = logging.getLogger("trencadis.engine")

OFF, OBSERVE, ON = "off", "observe", "on"

TICK_SECONDS = 0.25
SEARCH_SECONDS = 600.0
"""Seconds of load between two searches."""
LEAST_STEPS = 1000
"""Steps that must have been recorded before a search."""
SAVE_SECONDS = 3600.0
REPORT_SECONDS = 30.0
LEAST_COUNT = 5.0
"""Cells that were counted less often are not written to the profile."""
SHOWN_CELLS = 512
SHOWN_CHANGES = 32
CLOSING_SECONDS = 10.0
"""Seconds that the end of an engine waits for a profile that is being written."""


@dataclass(frozen=True)
class LearningSettings:
    """Settings of one engine's learning.

    Args:
        mode: ``observe``: report proposals; ``on``: change to those that pay.
        most: most shapes of text and images of a learned plan.
        profile: file that keeps the needs; empty: none.
        unchanged: stages whose sizes the user has set.
        time: the policy's cost of a launch, until launches have been measured.
        static: the plan of the limits.
    """

    static: Plan
    most: int
    time: Costs
    mode: str = OBSERVE
    profile: str = ""
    unchanged: tuple[Stage, ...] = ()


@dataclass
class PlanAccess:
    """Access to the plan, launch counts and timings of the rank that launches.

    Args:
        present: returns the plan that launches use now.
        failure: returns why the last change kept the plan; empty: it was published.
        take_times: returns the launches that were measured since the last call.
        launches: returns the launches so far.
        making_seconds: returns the seconds that compiling and capturing each bucket took.
        graph_bytes: returns the bytes of graphs, measured or predicted.
        pools: returns the stages that share a pool, and the bytes that it has for their graphs.
        launch_times: median seconds of launches that an earlier server has kept.
        keep_launches: stores median seconds of launches for the next start.
    """

    present: Callable[[], Plan]
    failure: Callable[[], str] = lambda: ""
    take_times: Callable[[], Sequence[LaunchTime]] = lambda: ()
    launches: Callable[[], int] = lambda: 0
    making_seconds: Callable[[], Mapping[Bucket, float]] = lambda: {}
    graph_bytes: Callable[[], Mapping[Bucket, int]] = lambda: {}
    pools: Callable[[], Sequence[tuple[frozenset[Stage], float]]] = lambda: ()
    launch_times: Mapping[Bucket, float] = field(default_factory=dict)
    keep_launches: Callable[[Mapping[Bucket, float]], None] = lambda seconds: None


@dataclass
class BucketLearning:
    """The learning of one engine. Only ``tick`` and what it calls change its state.

    Args:
        rank: the rank that launches.
        solve: runs a task of the search and waits for its answer; called in a thread.

    Attributes:
        pending: buckets that the engine is to change to.
        changing: the engine is changing to ``pending``.
        revision: grows whenever the report has changed.
        handled: requests to learn that have been answered.
    """

    settings: LearningSettings
    recorder: NeedRecorder
    rank: PlanAccess
    clock: Callable[[], float] = time.monotonic
    solve: Callable[[Task], Answer] = solve_in_child
    pending: FoundBuckets | None = None
    changing: bool = False
    revision: int = 0
    handled: int = 0
    rate: ChangeRate = field(default_factory=ChangeRate)
    history: deque[LearnedChange] = field(default_factory=lambda: deque(maxlen=SHOWN_CHANGES))
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._born = self._next = self._reported = self._saved = self.clock()
        self._searched_at = self._saved_load = 0.0
        self._proposal: FoundBuckets | None = None
        self._judged = False
        """True once the proposal was found to pay, and is only shown because shapes do not change here."""
        self._gain = 0.0
        self._costs: list[PlanCosts] = []
        """Costs of each period of traffic since the proposal was found."""
        self._thread: threading.Thread | None = None
        self._saver: threading.Thread | None = None
        self._found: Answer | str = ""
        self._force = self._asked = self._reverting = False
        self._warned = False
        known = [BucketTimes(bucket, [seconds]) for bucket, seconds in self.rank.launch_times.items()]
        self.times = LaunchTimes(self.settings.time).restore(LEAST_LAUNCHES if known else 0, known)
        self._measured: MeasuredCosts | None = None
        self._residuals: dict[Stage, Residual] = {}
        self._guard: ChangeGuard | None = None
        self._before: tuple[Bucket, ...] = ()
        self._launches = 0

    # What the engine calls

    @property
    def busy(self) -> bool:
        """True while a search, the pricing of a proposal or a change runs."""
        return self._thread is not None or self.changing or self.pending is not None

    def request(self, force: bool = False) -> None:
        """Starts a search now; does nothing while one, or a change, runs.

        Args:
            force: change to what is found at once, whatever it gains.
        """
        if self.busy:
            self.handled, self.revision = self.handled + 1, self.revision + 1
            return
        self._force, self._asked = force, True
        self._search()

    def tick(self) -> None:
        """Does what is due; cheap if nothing is."""
        now = self.clock()
        if now < self._next:
            return
        self._next = now + TICK_SECONDS
        self.recorder.collect()
        self._take_times(now)
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._take_found(now)
        if not self.busy and self.settings.mode != OFF:
            self._judge_or_search(now)
        if now - self._reported >= REPORT_SECONDS:
            self._reported, self.revision = now, self.revision + 1
        if now - self._saved >= SAVE_SECONDS and (self._saver is None or not self._saver.is_alive()):
            self._saved = now
            self._saver = threading.Thread(target=self._save, name="bucket profile", daemon=True)
            self._saver.start()

    def wait(self, seconds: float) -> None:
        """Waits for the search, at most ``seconds``; for an engine that has nothing else to do."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._next = min(self._next, self.clock())

    def begin_change(self) -> list[Bucket]:
        """Marks the change to ``pending`` as begun; returns the buckets of the stages that change."""
        assert self.pending is not None
        self.changing, self._before = True, self.present().buckets
        return [b for b in self.pending.buckets if b.stage not in KEPT_STAGES]

    def end_change(self, before: Plan) -> None:
        """Records the outcome of a change from the plan ``before``."""
        assert self.pending is not None
        failure = self.rank.failure()
        outcome = FAILURE if failure else REVERTED if self._reverting else PUBLISHED
        why = failure
        if outcome == REVERTED and self._guard is not None:
            why = f"launches took {self._guard.overrun:.3f} of what was predicted"
        self._note(outcome, before.buckets, self.present(), before.version, why)
        self.rate.note_change(self.clock())
        predict = self._measured if outcome == PUBLISHED else None
        self._guard = None if predict is None else self._make_guard(predict)
        self.pending, self._proposal, self.changing, self._reverting = None, None, False, False
        self._answer()

    def present(self) -> Plan:
        """Returns the plan that launches use now."""
        return self.rank.present()

    def save(self) -> None:
        """Adds what was recorded since the last call to the profile, and waits for it."""
        if self._saver is not None:
            self._saver.join(CLOSING_SECONDS)
        self._save()

    def _save(self) -> None:
        """Adds what was recorded since the last call to the profile; a file that cannot be written costs one line."""
        if self.times.count >= LEAST_LAUNCHES:
            self.rank.keep_launches(self.times.medians())
        loaded, self._saved_load = self.recorder.seconds - self._saved_load, self.recorder.seconds
        if not self.settings.profile:
            return
        plan, needs = self.settings.static, self.recorder.take_unsaved(LEAST_COUNT)
        fade = 2.0 ** (-loaded / self.recorder.half_life)
        try:
            merge_into_profile(self.settings.profile, needs, plan.policy, plan.block_size, LEAST_COUNT, fade)
        except StartupError as error:
            self.recorder.return_unsaved(needs)
            self._saved_load -= loaded
            if not self._warned:
                log.warning("the needs of this traffic are not kept: %s", error)
            self._warned = True

    def report(self) -> LearningReport:
        """Returns the state for ``GET /buckets``."""
        taken = self.recorder.snapshot()
        heaviest = sorted(taken.cells, key=lambda cell: -cell.weight)[:SHOWN_CELLS]
        shown = [NeedReport(c.key[0].name.lower(), c.key[1], list(c.dims), round(c.weight, 2)) for c in heaviest]
        return LearningReport(
            mode=self.settings.mode,
            version=self.present().version,
            steps=taken.steps,
            load_seconds=round(taken.seconds, 1),
            cells=len(taken.cells),
            histogram=sorted(shown),
            proposal=self._describe_proposal(),
            changes=list(self.history),
            state="changing" if self.changing else "searching" if self.busy else "idle",
            handled=self.handled,
            outcomes=dict(self.outcomes),
            launches=self.times.count,
            residuals=self._describe_residuals(),
        )

    # Searching and judging

    def _judge_or_search(self, now: float) -> None:
        if self._proposal is not None and not self._judged:
            periods = self.recorder.take_periods()
            if periods is not None:
                static, cells = self.settings.static, [period.list_cells() for period in periods]
                found = self._proposal.buckets, self._proposal.recent
                proposed, recent = (dataclasses.replace(static, buckets=buckets) for buckets in found)
                time = self._measured or self.settings.time
                self._run(PriceTask(cells, proposed, self.present(), static, recent, time))
            return
        due = self.recorder.seconds - self._searched_at >= SEARCH_SECONDS
        if due and self.recorder.steps >= LEAST_STEPS:
            self._search()

    def _search(self) -> None:
        """Starts a search by the needs recorded so far."""
        self._searched_at = self.recorder.seconds
        s, charges = self.settings, {stage: took / HORIZON_SECONDS for stage, took in self._making_seconds().items()}
        self._run(
            LearnTask(
                s.static, self.recorder.snapshot().cells, s.most, s.time, s.unchanged,
                self.present().buckets, charges, self.times.count, self.times.list_seconds(),
                self.rank.graph_bytes(), self.rank.pools(), self.recorder.snapshot(recent=True).cells,
            )
        )  # fmt: skip

    def _making_seconds(self) -> dict[Stage, float]:
        """Returns, by stage, the mean seconds that making a bucket has taken."""
        took = self.rank.making_seconds()
        return {stage: mean(s for b, s in took.items() if b.stage is stage) for stage in {b.stage for b in took}}

    def _change_seconds(self, buckets: Sequence[Bucket]) -> float:
        """Returns the seconds that a change to ``buckets`` is expected to take."""
        making = self._making_seconds()
        usual = mean(making.values()) if making else 0.0
        return sum(making.get(bucket.stage, usual) for bucket in set(buckets) - set(self.present().buckets))

    def _run(self, task: Task) -> None:
        """Runs a task in a thread; ``tick`` takes its answer."""
        self._thread = threading.Thread(target=self._work, args=(task,), name="bucket search", daemon=True)
        self._thread.start()

    def _work(self, task: Task) -> None:
        """Body of the thread."""
        try:
            self._found = self.solve(task)
        except SearchFailed as error:
            self._found = str(error)
        except Exception as error:
            log.exception("the search for shapes failed")
            self._found = f"{type(error).__name__}: {error}"[:200]

    # After a change

    def _take_times(self, now: float) -> None:
        """Takes the launches that were measured, and goes back to the old shapes if the last change did not pay."""
        for launch in self.rank.take_times():
            self.times.add(*launch)
            if self._guard is not None:
                self._guard.add(*launch)
        if self._guard is None or self.busy:
            return
        self._guard.launches = self.rank.launches() - self._launches
        verdict = self._guard.verdict()
        if verdict == REVERTED:
            self.pending, self._reverting = FoundBuckets(self._guard.before, len(self._guard.before), 0, 0, 0), True
            self.rate.hold(now)
        elif verdict:
            self._guard = None

    def _make_guard(self, predict: MeasuredCosts) -> ChangeGuard:
        """Returns the guard of the change that has just been published."""
        self._launches = self.rank.launches()
        medians = self.times.medians()
        predicted = sum(map(predict, medians))
        return ChangeGuard(self._before, predict, sum(medians.values()) / predicted if predicted else 1.0)

    def _describe_residuals(self) -> dict[str, list[float]]:
        """Returns, by stage, the median and the 95th percentile of the relative errors of predicted seconds."""
        return {stage.name.lower(): [round(r.median, 4), round(r.high, 4)] for stage, r in self._residuals.items()}

    def _take_found(self, now: float) -> None:
        found, force = self._found, self._force
        self._found, self._force = "", False
        present = self.present()
        if isinstance(found, FoundBuckets):
            self._measured, self._residuals = found.time, found.residuals
            kept = [b for b in present.buckets if b.stage in KEPT_STAGES]  # fewer than in the plan of the limits
            buckets, recent = (
                tuple(sorted([*kept, *(b for b in plan if b.stage not in KEPT_STAGES)]))
                for plan in (found.buckets, found.recent or found.buckets)
            )
            found = dataclasses.replace(found, buckets=buckets, recent=recent)
        if isinstance(found, list):
            self._judge(found, now)
        elif isinstance(found, str):
            self._note(FAILURE, present.buckets, present, present.version, found)
            self._proposal = None
            self._answer()
        elif set(found.buckets) == set(found.recent) == set(present.buckets):
            self._proposal = None
            self._answer()
        elif force:
            self.pending = found
        elif self._judged and self._proposal is not None and set(found.buckets) == set(self._proposal.buckets):
            self._answer()
        else:
            self._proposal, self._gain, self._judged, self._costs = found, 0.0, False, []
            self.recorder.begin_periods()
            self._note(PROPOSED, present.buckets, dataclasses.replace(present, buckets=found.buckets))
            self._answer()
        self.revision += 1

    def _judge(self, costs: Sequence[PlanCosts], now: float) -> None:
        """Decides about the proposal by what the traffic since it was made costs.

        That of the last hour's needs takes its place where it costs less; if that is certain, the traffic has shifted.
        Each period is then priced by the plan that the other ones prefer.
        """
        assert self._proposal is not None
        present, proposal = self.present(), self._proposal
        self._costs = costs = [*self._costs, *costs]
        if plan_change_rules.is_recent_better(costs):
            proposal = dataclasses.replace(proposal, buckets=proposal.recent)
            if plan_change_rules.has_traffic_shifted(costs):
                self.recorder.start_over()
        costs = plan_change_rules.cross_validate(costs)
        self._gain = plan_change_rules.gain_of(costs)
        self.revision += 1
        takes = self._change_seconds(proposal.buckets)
        verdict = plan_change_rules.judge(costs, takes, PERIOD_SECONDS * len(costs))
        if plan_change_rules.needs_more_evidence(verdict, costs):
            self.recorder.begin_periods()
            return
        if verdict == PUBLISHED:
            verdict = self.rate.refuses(now) or verdict
        if verdict == PUBLISHED and self.settings.mode == ON:
            self.pending = proposal
        elif verdict != PUBLISHED:
            self._note(verdict, present.buckets, dataclasses.replace(present, buckets=proposal.buckets))
        self._judged = verdict == PUBLISHED and self.settings.mode != ON
        self._proposal = proposal if self._judged else None

    # Records

    def _answer(self) -> None:
        if self._asked:
            self._asked, self.handled = False, self.handled + 1
        self.revision += 1

    def _note(self, outcome: str, before: Sequence[Bucket], after: Plan, version: int = 0, why: str = "") -> None:
        old, new = set(before), set(after.buckets)
        self.outcomes[outcome] += 1
        self.history.append(
            LearnedChange(
                round(self.clock() - self._born, 1), outcome, version or after.version, after.version, len(new - old),
                len(old - new), round(self._gain, 4), why,
            )
        )  # fmt: skip
        log.info("shapes: %s, %d added, %d given back%s", outcome, len(new - old), len(old - new), why and f": {why}")

    def _describe_proposal(self) -> ProposedPlan | None:
        found = self.pending or self._proposal
        if found is None:
            return None
        old, new, static = set(self.present().buckets), set(found.buckets), found.static or 1.0
        return ProposedPlan(
            found.graphs, round(found.cost / static, 4), round(found.bound / static, 4), round(self._gain, 4),
            sorted(map(str, new - old)), sorted(map(str, old - new)),
        )  # fmt: skip
