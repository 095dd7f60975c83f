"""One choice's masks: forks and rollbacks leave no trace, ends are kept, and rows without a rule are what they were."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.masks.test_late_masks import GRAMMARS, random_rule
from tests.traffic.rule_oracle import EOS, SIXTY, TOKENS, VOCABULARY
from trencadis.backends.cuda.launches import cuda_host_arrays as cuda
from trencadis.backends.cuda.launches.input_buffers import buffer_bytes
from trencadis.backends.hpu.launches import hpu_host_arrays as hpu
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.launches.host_inputs import SampleRow, head_inputs
from trencadis.core.output_constraints import LIBRARY_FAILED, Repetition, Rule, ThinkingBudget, repeats
from trencadis.core.request import SamplingParams
from trencadis.core.step import Opening, Sample
from trencadis.core.token_masks.grammar_matcher import GrammarMatcher
from trencadis.core.token_masks.matcher_manager import ChoiceMasks, MatcherManager
from trencadis.core.token_masks.token_rule_matchers import BadWords, ThinkingMatcher

VOCAB = len(TOKENS)
SIZES = cuda.Sizes(block_size=16, row_blocks=2, vocab=VOCAB)


@pytest.fixture(scope="module")
def manager() -> MatcherManager:
    made = MatcherManager(VOCAB, (EOS,))
    made.grammars.set_vocabulary(VOCABULARY.pack())
    return made


def opened(
    manager: MatcherManager, rule: Rule, stops: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> ChoiceMasks:
    manager.apply((), [Opening(1, rule, output, stops)])
    return manager._choices[1]


def ids(choice: ChoiceMasks, banned: tuple[int, ...] = ()) -> set[int]:
    row = np.empty(-(-VOCAB // 8), np.uint8)
    choice.fill(row, banned)
    return set(np.unpackbits(row, bitorder="little").nonzero()[0].tolist())


def walk(manager: MatcherManager, seed: int) -> None:
    """Goes on, back, and on in a fork; the mask is always that of a choice that only ever went on."""
    rng = random.Random(seed)
    rule = random_rule(rng)
    params = SamplingParams(max_tokens=None, stop_token_ids=rng.sample(range(1, 30), rng.choice([0, 3])))
    choice, output = opened(manager, rule, tuple(params.stop_token_ids)), list[int]()
    for _ in range(30):
        over = bool(output) and SIXTY.over(rule, params, output) == "stop"
        may = set[int]() if over else SIXTY.may_draw(rule, params, output)
        assert ids(choice) == ({EOS} if over or not may else may), output
        if over or not may or (output and rng.random() < 0.3):
            back = rng.randint(0, len(output))
            if choice.failure or not back:
                return
            choice.rollback(back)
            del output[len(output) - back :]
            continue
        token = rng.choice(sorted(may))
        if rng.random() < 0.3:
            other = choice.fork()
            other.accept(rng.choice(sorted(may)))
            ids(other)
        choice.accept(token)
        output.append(token)


@pytest.mark.parametrize("seed", range(40))
def test_going_back_and_branching_off_leave_no_trace(seed: int, manager: MatcherManager) -> None:
    walk(manager, seed)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a grammar does not go back": (GrammarMatcher, "rollback", lambda self, count: None),
    "words do not go back": (BadWords, "rollback", lambda self, count: None),
    "a thought's tokens stay spent": (ThinkingMatcher, "rollback", lambda self, count: None),
    "a choice forgets how far it went back": (
        ChoiceMasks, "rollback", lambda self, count: [m.rollback(count) for m in self._others]
    ),
    "a fork of a grammar is the grammar": (GrammarMatcher, "fork", lambda self: self),
    "a fork of words is the words": (BadWords, "fork", lambda self: self),
    "a fork of a thought is the thought": (ThinkingMatcher, "fork", lambda self: self),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_in_going_back_is_caught(
    name: str, manager: MatcherManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, made = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, made)
    with pytest.raises(AssertionError):
        for seed in range(400):
            walk(manager, seed)


def test_a_finished_grammar_wins_over_bans(manager: MatcherManager) -> None:
    choice = opened(manager, Rule(grammar=GRAMMARS[3]))
    assert ids(choice, (EOS,)) == {1, 2, 53}
    choice.accept(1)
    assert ids(choice, (EOS,)) == {EOS}
    choice.accept(EOS)
    assert choice.ended and ids(choice) == {EOS}


def test_a_stop_id_is_text_where_the_grammar_may_not_end(manager: MatcherManager) -> None:
    choice = opened(manager, Rule(grammar=GRAMMARS[0]), stops=(1, 30))
    assert 30 not in ids(choice) and 1 in ids(choice)
    assert choice.accept(1) and not choice.ended
    assert not choice.accept(2) and not choice.accept(3)
    assert {EOS, 1, 30} <= ids(choice)
    assert not choice.accept(30) and choice.ended


def test_allowed_ids_are_all_there_is_but_beside_a_grammar_its_end(manager: MatcherManager) -> None:
    assert ids(opened(manager, Rule(allowed=(3, 5)))) == {3, 5}
    both = opened(manager, Rule(grammar=GRAMMARS[3], allowed=(1, 2, 3)))
    assert ids(both) == {1, 2}
    both.accept(1)
    assert ids(both) == {EOS}


def test_constraints_that_leave_nothing_fail_the_choice_alone(manager: MatcherManager) -> None:
    choice = opened(manager, Rule(grammar=GRAMMARS[3], words=((1,), (2,), (53,))))
    assert ids(choice) == {EOS} and choice.failure == "The constraints of this request leave no token that may follow."


@pytest.mark.parametrize("name", ["unsafe_compute_mask_ptr", "consume_token"])
def test_a_library_that_panics_breaks_one_matcher(name: str, manager: MatcherManager) -> None:
    class Panic(BaseException):
        """What the library's binding raises is no Exception."""

    class Panicking:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, requested: str) -> Any:
            if requested == name:
                raise Panic("index out of bounds\nnote: run with RUST_BACKTRACE=1")
            return getattr(self.inner, requested)

    choice = opened(manager, Rule(grammar=GRAMMARS[0]))
    assert choice._grammar is not None
    choice._grammar._matcher = Panicking(choice._grammar._matcher)  # type: ignore[assignment]
    if name == "consume_token":
        choice.accept(1)
    assert ids(choice) == {EOS} and choice.failure == "the grammar library failed: index out of bounds"
    assert 1 in ids(opened(manager, Rule(grammar=GRAMMARS[0])))


def test_without_a_vocabulary_a_choice_fails_and_nothing_else() -> None:
    choice = opened(MatcherManager(VOCAB, (EOS,)), Rule(grammar=GRAMMARS[0]))
    assert ids(choice) == {EOS} and choice.failure == f"{LIBRARY_FAILED}the vocabulary of grammars was not sent"


@pytest.mark.parametrize("rows", [1, 4, 128])
def test_a_full_bucket_holds_a_mask_of_its_own_for_each_row(rows: int) -> None:
    """On planned devices, in the bytes that the ledger counts."""
    samples = [SampleRow(i + 1, i + 1, Sample(full=True, handle=i + 1)) for i in range(rows)]
    inputs = head_inputs(samples, VOCAB, lambda handle, row, banned, ahead=(): row.fill(handle))
    bucket = Bucket(Stage.SAMPLE, (rows,), "full")
    for made in (hpu.arrays(bucket, inputs, hpu.LaunchForm(16, VOCAB)), cuda.arrays(bucket, inputs, SIZES)):
        assert made.masks[made.mask_row[:rows]].tolist() == [[i % 256] * 8 for i in range(1, rows + 1)]
    name, shape = cuda.growing_tensor(bucket, SIZES)
    assert (name, shape) == ("masks", (rows + 1, 8)) and buffer_bytes(bucket, SIZES) >= inputs.masks.nbytes


def test_a_budget_of_no_tokens_ends_a_thought_at_once_and_a_sequence_of_ids_is_forced_whole() -> None:
    matcher = ThinkingMatcher(ThinkingBudget(0, (7,), (8, 9, 8)))
    row = np.full(2, 255, np.uint8)
    matcher.restrict(row)
    assert row.tolist() == [255, 255]
    forced = []
    matcher.accept(7)
    while matcher.forced >= 0:
        forced.append(matcher.forced)
        matcher.accept(forced[-1])
    assert forced == [8, 9, 8]


def test_repetitions() -> None:
    rule = Repetition(2, 3, 3)
    assert repeats([9, 1, 2, 1, 2, 1, 2], rule) and repeats([1, 2, 3] * 3, rule) and repeats([4] * 6, rule)
    assert not repeats([1, 2, 1, 2, 2], rule) and not repeats([4] * 5, rule) and not repeats([1, 2, 3, 4] * 3, rule)


def rows(rng: random.Random, handles: bool) -> list[SampleRow]:
    made = []
    for i in range(rng.randint(1, 9)):
        banned = tuple(sorted(rng.sample(range(VOCAB), rng.choice([0, 0, 3]))))
        sample = Sample(rng.random(), rng.randrange(9), banned=banned, full=True, handle=handles * rng.randrange(3))
        made.append(SampleRow(i + 1, rng.randrange(20), sample))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_rows_without_a_handle_send_what_they_always_sent(seed: int, manager: MatcherManager) -> None:
    """Bit for bit: beside rows with handles too, whose masks lie behind."""
    requested = rows(random.Random(seed), handles=True)
    plain = [r._replace(sample=replace(r.sample, handle=0)) for r in requested]
    lists = list(dict.fromkeys([(), *(r.sample.banned for r in plain)]))
    masks = [[sum((8 * b + i not in banned) << i for i in range(8)) for b in range(8)] for banned in lists]
    old = head_inputs(plain, VOCAB)
    assert old.masks.tolist() == masks and old.masks.dtype == np.uint8 and old.mask_row.dtype == np.int32
    assert old.mask_row.tolist() == [lists.index(r.sample.banned) for r in plain]
    new = head_inputs(requested, VOCAB, lambda handle, row, banned, ahead=(): row.fill(handle))
    for field in ("hidden_row", "slot", "temperature", "top_k", "top_p", "min_p", "uniform", "target"):
        assert getattr(new, field).tobytes() == getattr(old, field).tobytes()
    for i, row in enumerate(requested):
        want = [row.sample.handle] * 8 if row.sample.handle else masks[lists.index(row.sample.banned)]
        assert new.masks[new.mask_row[i]].tolist() == want
    assert len(new.masks) <= len(requested) + 1 and set(new.masks[0].tolist()) == {255}
