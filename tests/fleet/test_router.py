"""The router: loads are charged at the decision, what is known of caches is bounded and corrected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trencadis.server.processes.replica_router import (
    MAX_IMAGE_HOLDERS,
    MAX_IMAGES,
    MAX_PREFIX_HOLDERS,
    RANDOM_REPLICAS,
    CacheIndex,
    PrefixAffinityRouter,
    ReplicationPolicy,
)
from trencadis.server.processes.replica_wait_prediction import (
    Assignment,
    ReplicaCosts,
    ReplicaLoad,
    RequestCost,
    RoutedImage,
    RoutedPrefix,
    StepCosts,
    is_indexed_prefix,
)


def opened(count: int, **options) -> Any:
    router = PrefixAffinityRouter(count, **options)
    for i in range(count):
        router.open(i)
    return router


def chat(session: int, blocks: int, tokens: int = 0, images: tuple[RoutedImage, ...] = ()) -> RequestCost:
    """A prompt whose first ``blocks`` blocks are those of ``session``."""
    prefixes = [RoutedPrefix(session * 1000 + i, 128 * i) for i in range(1, blocks + 1)]
    return RequestCost(tokens or 128 * blocks + 40, prefixes, images)


def test_a_burst_spreads_before_any_replica_has_answered():
    router = opened(8)
    chosen = [router.choose(chat(i, 8), 0.0).replica for i in range(64)]
    assert [chosen.count(i) for i in range(8)] == [8] * 8


def test_a_session_comes_back_to_its_replica_and_leaves_it_when_that_is_busier_than_computing_it_again():
    router = opened(64, seed=3)
    first = router.choose(chat(1, 10), 0.0)
    router.on_first_token(first, 0.1)
    router.on_ended(first, 1.0)
    for _ in range(5):
        ticket = router.choose(chat(1, 12), 2.0)
        assert ticket.replica == first.replica
        router.on_ended(ticket, 2.0)
    router.assign(first.replica, RequestCost(40_000), 3.0)
    assert router.choose(chat(1, 12), 3.0).replica != first.replica


def test_a_miss_goes_by_load_and_not_by_the_emptiest_cache():
    router = opened(2)
    for i in range(20):  # replica 0 knows much and has nothing to do
        router.on_ended(router.assign(0, chat(i, 30), 0.0), 0.0)
    router.assign(1, chat(99, 30), 0.0)
    assert router.choose(chat(77, 5), 0.0).replica == 0


def test_a_hot_prefix_gets_more_holders_while_it_is_asked_for():
    router = opened(100, seed=1)
    hot = chat(5, 100, 128 * 100 + 800)
    now, open_tickets = 0.0, []
    for _ in range(300):
        now += 0.01
        open_tickets.append((now, router.choose(hot, now)))
        while open_tickets and open_tickets[0][0] < now - 0.5:
            ticket = open_tickets.pop(0)[1]
            router.on_first_token(ticket, now)
            router.on_ended(ticket, now)
    holders = len(router.prefixes.get_holders(hot.prefixes[-1].key))
    assert 2 <= holders <= 40, holders


def test_an_image_is_worth_the_seconds_that_its_encoding_takes():
    image = RoutedImage(42, 8192, 600)
    router = opened(50)
    router.on_ended(router.assign(7, chat(1, 3, images=(image,)), 0.0), 0.0)
    assert router.choose(chat(2, 6, images=(image,)), 1.0).replica == 7
    router.on_evicted(7, [], [42])
    assert not router.images.get_holders(42)


def test_an_image_inside_a_cached_prefix_is_not_noted_as_encoded():
    image = RoutedImage(42, 640, 200)
    router = opened(1)
    router.assign(0, chat(1, 3, images=(image,)), 0.0)
    router.on_evicted(0, [], [42])
    router.assign(0, chat(1, 4, images=(image,)), 1.0)
    assert not router.images.get_holders(42)


def test_reported_evictions_end_what_a_replica_is_chosen_for():
    router = opened(40, seed=2)
    router.on_ended(router.assign(11, chat(1, 20), 0.0), 0.0)
    assert router.choose(chat(1, 20), 1.0).replica == 11
    router.on_evicted(11, [p.key for p in chat(1, 20).prefixes])
    assert not any(router.prefixes.get_holders(p.key) for p in chat(1, 20).prefixes)


def test_a_request_goes_where_it_is_pinned_and_nowhere_it_must_avoid():
    router = opened(4)
    assert [router.choose(chat(1, 2), 0.0, pinned=2).replica for _ in range(5)] == [2] * 5
    assert {router.choose(chat(i, 2), 0.0, avoid=(0, 1, 2)).replica for i in range(20)} == {3}
    assert router.choose(chat(1, 2), 0.0, avoid=(0, 1, 2, 3)) is None
    router.on_engine_lost(2)
    assert router.choose(chat(1, 2), 0.0, pinned=2) is None
    assert not router.prefixes.get_holders(chat(1, 2).prefixes[0].key) or router.prefixes.holds(
        3, chat(1, 2).prefixes[0].key
    )


@pytest.mark.parametrize("count", [8, 64, 1000])
def test_a_decision_looks_at_as_many_replicas_at_a_thousand_as_at_few(count):
    router = opened(count)
    images = tuple(RoutedImage(i, 64, 10) for i in range(6))
    worst = 0
    for _ in range(300):
        router.choose(chat(1, 30, images=images), 0.0)
        worst = max(worst, router.examined)
    assert worst <= RANDOM_REPLICAS + MAX_PREFIX_HOLDERS + MAX_IMAGES * MAX_IMAGE_HOLDERS


def test_a_copy_is_made_once_requests_have_waited_for_as_long_as_it_takes():
    policy = ReplicationPolicy(bound=2)
    assert [policy.should_replicate(1, 0.4, 1.0) for _ in range(7)] == [False, False, True, False, False, True, False]
    policy.should_replicate(2, 0.9, 1.0)
    policy.should_replicate(3, 0.9, 1.0)
    assert len(policy) == 2 and not policy.should_replicate(1, 0.7, 1.0), "what paid longest ago is forgotten"
    assert policy.should_replicate(3, 0.1, 1.0)


def test_a_shared_start_gets_holders_where_others_are_idle_and_its_holder_is_never_busy_for_as_long():
    """Each request alone would rather wait a few milliseconds at the holder than compute the start again."""
    router, now = opened(40, seed=4), 0.0
    for i in range(200):
        now += 0.02
        start = [RoutedPrefix(key, 128 * key) for key in range(1, 11)]
        ticket = router.choose(RequestCost(1400, [*start, RoutedPrefix(1000 + i, 1400)]), now)
        router.on_first_token(ticket, now)  # it goes on to decode, so that later ones wait for its steps
    assert 5 <= len(router.prefixes.get_holders(10)) <= 30


def test_known_prefixes_are_few_and_no_more_than_an_eighth_short():
    units = [n for n in range(1, 1025) if is_indexed_prefix(n)]
    assert len(units) <= 128
    assert all(n - max(u for u in units if u <= n) <= n / 8 for n in range(1, 1025))


def test_a_replica_whose_rows_or_blocks_are_used_up_is_waited_for():
    full, free = ReplicaLoad(StepCosts(), rows=4, capacity=10_000), ReplicaLoad(StepCosts(), rows=4, capacity=10_000)
    for load, count in ((full, 4), (free, 3)):
        for _ in range(count):
            ticket = Assignment(0, 0.0, 100)
            load.charge(ticket, 0.0)
            load.on_first_token(ticket, 0.0)
    assert full.wait(1.0) > free.wait(1.0) + 0.2
    assert free.wait(1.0, tokens=12_000) > free.wait(1.0) + 0.1


def test_costs_follow_the_launches_that_an_engine_reports():
    costs = StepCosts()
    for _ in range(200):
        costs.observe_prefill(1000, 0.5)
        costs.observe_encode(640, 0.064)
        costs.observe_decode(8, 0.03)
    assert costs.token == pytest.approx(5e-4, rel=0.01)
    assert costs.slot == pytest.approx(1e-4, rel=0.01)
    assert costs.step + 8 * costs.row == pytest.approx(0.03, rel=0.02)


def test_a_launch_that_compiled_is_forgotten_and_small_ones_say_little():
    costs = StepCosts()
    costs.observe_prefill(1000, 0.05)
    costs.observe_prefill(1000, 60.0)
    assert costs.token < 10 * 5e-5
    before = costs.token
    costs.observe_prefill(3, 0.03)
    assert costs.token < 1.1 * before


def test_a_replica_that_has_shown_little_costs_what_the_others_do():
    book = ReplicaCosts(3, 2048)
    for _ in range(6):
        book.learn(0, "vision", 512, 0.5)
        book.learn(0, "prefill", 512, 0.1)
    assert book.each[1].slot == book.each[0].slot > 1e-4 and book.each[2].token == book.each[0].token
    for _ in range(40):
        book.learn(1, "vision", 512, 0.05)
    assert book.each[1].slot < book.each[0].slot / 5


class Index(RuleBasedStateMachine):
    """The index against plain lists."""

    @initialize(bound=st.integers(1, 6))
    def begin(self, bound):
        self.bound, self.index, self.lists = bound, CacheIndex(bound), {}

    @rule(replica=st.integers(0, 3), keys=st.lists(st.integers(0, 9), max_size=8))
    def used(self, replica, keys):
        self.index.mark_used(replica, keys)
        held = self.lists.setdefault(replica, [])
        for key in keys:
            if key in held:
                held.remove(key)
            held.append(key)
        del held[: max(len(held) - self.bound, 0)]

    @rule(replica=st.integers(0, 3), keys=st.lists(st.integers(0, 9), max_size=4))
    def evicted(self, replica, keys):
        self.index.remove_evicted(replica, keys)
        self.lists[replica] = [k for k in self.lists.get(replica, []) if k not in keys]

    @rule(replica=st.integers(0, 3))
    def forgotten(self, replica):
        self.index.forget(replica)
        self.lists[replica] = []

    @invariant()
    def agrees(self):
        if not hasattr(self, "index"):
            return
        holders_of, held_of = self.index._holders, self.index._held
        pairs = {(key, r) for key, holders in holders_of.items() for r in holders}
        assert pairs == {(key, r) for r, held in held_of.items() for key in held}, "the two directions differ"
        assert len(pairs) == sum(len(h) for h in holders_of.values()), "a holder is listed twice"
        assert all(holders_of.values()), "a key without holders is kept"
        assert all(len(held) <= self.index.bound for held in held_of.values()), "the index exceeds its bound"
        for key in range(10):
            assert set(self.index.get_holders(key)) == {r for r, held in self.lists.items() if key in held}
        assert len(self.index) == sum(map(len, self.lists.values()))


Index.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestIndex = Index.TestCase


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_loads_return_to_nothing_however_requests_begin_and_end(data):
    router, live, now = opened(3, seed=data.draw(st.integers(0, 9))), [], 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 1))
        act = data.draw(st.sampled_from(("come", "come", "begin", "end", "end")))
        if act == "come":
            work = RequestCost(data.draw(st.integers(1, 5000)))
            waits = [load.wait(now) for load in router.loads]
            ticket = router.choose(work, now)
            assert router.loads[ticket.replica].wait(now) > waits[ticket.replica], "not charged at the decision"
            live.append(ticket)
        elif live:
            ticket = live[data.draw(st.integers(0, len(live) - 1))]
            if act == "begin":
                router.on_first_token(ticket, now)
            else:
                live.remove(ticket)
                router.on_ended(ticket, now)
        assert sum(load.open for load in router.loads) == len(live)
        assert all(load.wait(now) >= 0 and load.queued > -1e-9 for load in router.loads)
    for ticket in live:
        router.on_ended(ticket, now)
    assert all((load.open, load.tokens, load.queued, load.wait(now)) == (0, 0, 0.0, 0.0) for load in router.loads)
