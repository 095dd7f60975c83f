"""Learns the shapes of an engine from its traffic: records, proposes, has proposals judged, and keeps a profile.

The engine's thread calls ``tick`` before each step. A search takes two seconds and the pricing of a proposal half of
one; both run in a thread of their own. A proposal is judged by traffic that came after it, unless ``force`` is
given; then ``pending`` has the plan that the engine is to change to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trencadis.core.bucket_plan import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.engine_stats import (
    FAILURE,
    PROPOSED,
    PUBLISHED,
    LearnedChange,
    LearningReport,
    NeedReport,
    ProposedPlan,
)
from trencadis.core.errors import StartupError
from trencadis.core.shapes import change_rules
from trencadis.core.shapes.bucket_profile import merge_into_profile
from trencadis.core.shapes.change_rules import ChangeRate, PlanCosts
from trencadis.core.shapes.learned_plan import KEPT_STAGES, LearnedPlan, TooFewGraphs, learn_plan
from trencadis.core.shapes.need_recorder import NeedRecorder, NeedSnapshot

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

Found = LearnedPlan | list[PlanCosts] | str
"""Result of the search thread: a plan; or the costs of the present proposal by period; or why there is neither."""


@dataclass(frozen=True)
class LearningSettings:
    """Settings of one engine's learning.

    Args:
        mode: ``observe``: report proposals; ``on``: change to those that pay.
        most: most shapes of text and images of a learned plan.
        profile: file that keeps the needs; empty: none.
        unchanged: stages whose sizes the user has set.
        work: operations of a launch (``launch_costs.work_of``).
        static: the plan of the limits.
    """

    static: Plan
    most: int
    work: Callable[[Bucket], float]
    mode: str = OBSERVE
    profile: str = ""
    unchanged: tuple[Stage, ...] = ()


@dataclass
class BucketLearning:
    """The learning of one engine. Only ``tick`` and what it calls change its state.

    Args:
        present: returns the plan that launches use now.
        failure: returns why the last change kept the plan; empty: it was published.

    Attributes:
        pending: a plan that the engine is to change to.
        changing: the engine is changing to ``pending``.
        revision: grows whenever the report has changed.
        handled: requests to learn that have been answered.
    """

    settings: LearningSettings
    recorder: NeedRecorder
    present: Callable[[], Plan]
    failure: Callable[[], str]
    clock: Callable[[], float] = time.monotonic
    pending: LearnedPlan | None = None
    changing: bool = False
    revision: int = 0
    handled: int = 0
    rate: ChangeRate = field(default_factory=ChangeRate)
    history: deque[LearnedChange] = field(default_factory=lambda: deque(maxlen=SHOWN_CHANGES))
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._born = self._next = self._reported = self._saved = self.clock()
        self._searched_at = self._saved_load = 0.0
        self._proposal: LearnedPlan | None = None
        self._gain = 0.0
        self._thread: threading.Thread | None = None
        self._found: Found = ""
        self._force = self._asked = False
        self._warned = False

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
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._take_found(now)
        if not self.busy and self.settings.mode != OFF:
            self._judge_or_search(now)
        if now - self._reported >= REPORT_SECONDS:
            self._reported, self.revision = now, self.revision + 1
        if now - self._saved >= SAVE_SECONDS:
            self.save()

    def wait(self, seconds: float) -> None:
        """Waits for the search, at most ``seconds``; for an engine that has nothing else to do."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._next = min(self._next, self.clock())

    def begin_change(self) -> list[Bucket]:
        """Marks the change to ``pending`` as begun; returns the buckets of the stages that change."""
        assert self.pending is not None
        self.changing = True
        return [b for b in self.pending.plan.buckets if b.stage not in KEPT_STAGES]

    def end_change(self, before: Plan) -> None:
        """Records the outcome of a change from the plan ``before``."""
        assert self.pending is not None
        failure = self.failure()
        outcome = FAILURE if failure else PUBLISHED
        self._note(outcome, before, self.present(), failure)
        self.rate.note_change(self.clock())
        self.pending, self._proposal, self.changing = None, None, False
        self._answer()

    def save(self) -> None:
        """Adds what was recorded since the last call to the profile; a file that cannot be written costs one line."""
        loaded, self._saved_load = self.recorder.seconds - self._saved_load, self.recorder.seconds
        self._saved = self.clock()
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
        )

    # Searching and judging

    def _judge_or_search(self, now: float) -> None:
        if self._proposal is not None:
            periods = self.recorder.take_periods()
            if periods is not None:
                proposed, present, static = self._proposal.plan, self.present(), self.settings.static
                self._run(lambda: change_rules.price_periods(periods, proposed, present, static))
            return
        due = self.recorder.seconds - self._searched_at >= SEARCH_SECONDS
        if due and self.recorder.steps >= LEAST_STEPS:
            self._search()

    def _search(self) -> None:
        """Starts a search by all needs recorded so far."""
        self._searched_at = self.recorder.seconds
        needs = self.recorder.snapshot()
        self._run(lambda: self._learn(needs))

    def _run(self, work: Callable[[], Found]) -> None:
        """Runs ``work`` in the thread; ``tick`` takes what it returns."""
        self._thread = threading.Thread(target=self._work, args=(work,), name="bucket search", daemon=True)
        self._thread.start()

    def _work(self, work: Callable[[], Found]) -> None:
        """Body of the thread."""
        try:
            self._found = work()
        except Exception as error:
            log.exception("the search for shapes failed")
            self._found = f"{type(error).__name__}: {error}"[:200]

    def _learn(self, needs: NeedSnapshot) -> LearnedPlan | str:
        s = self.settings
        if not needs.cells:
            return "nothing has been recorded"
        try:
            return learn_plan(s.static, needs.histogram(), s.most, s.unchanged, s.work)
        except TooFewGraphs as error:
            return f"--max-graphs {s.most}: these limits need at least {error.least}"

    def _take_found(self, now: float) -> None:
        found, force = self._found, self._force
        self._found, self._force = "", False
        present = self.present()
        if isinstance(found, list):
            self._judge(found, now)
        elif isinstance(found, str):
            self._note(FAILURE, present, present, found)
            self._proposal = None
            self._answer()
        elif set(found.plan.buckets) == set(present.buckets):
            self._answer()
        elif force:
            self.pending = found
        else:
            self._proposal, self._gain = found, 0.0
            self.recorder.begin_periods()
            self._note(PROPOSED, present, found.plan, "")
            self._answer()
        self.revision += 1

    def _judge(self, costs: Sequence[PlanCosts], now: float) -> None:
        """Decides about the proposal by what the traffic since it was made costs."""
        assert self._proposal is not None
        present = self.present()
        self._gain = change_rules.gain_of(costs)
        verdict = change_rules.judge(costs)
        if verdict == PUBLISHED:
            verdict = self.rate.refuses(now) or verdict
        if verdict == PUBLISHED and self.settings.mode == ON:
            self.pending = self._proposal
        elif verdict != PUBLISHED:
            self._note(verdict, present, self._proposal.plan, "")
        if verdict != PUBLISHED or self.settings.mode == ON:
            self._proposal = None
        else:
            self.recorder.begin_periods()
        self.revision += 1

    # Records

    def _answer(self) -> None:
        if self._asked:
            self._asked, self.handled = False, self.handled + 1
        self.revision += 1

    def _note(self, outcome: str, before: Plan, after: Plan, why: str) -> None:
        old, new = set(before.buckets), set(after.buckets)
        self.outcomes[outcome] += 1
        self.history.append(
            LearnedChange(
                round(self.clock() - self._born, 1), outcome, before.version, after.version, len(new - old),
                len(old - new), round(self._gain, 4), why,
            )
        )  # fmt: skip
        log.info("shapes: %s, %d added, %d given back%s", outcome, len(new - old), len(old - new), why and f": {why}")

    def _describe_proposal(self) -> ProposedPlan | None:
        found = self.pending or self._proposal
        if found is None:
            return None
        old, new, static = set(self.present().buckets), set(found.plan.buckets), found.static or 1.0
        return ProposedPlan(
            found.graphs, round(found.cost / static, 4), round(found.bound / static, 4), round(self._gain, 4),
            sorted(map(str, new - old)), sorted(map(str, old - new)),
        )  # fmt: skip
