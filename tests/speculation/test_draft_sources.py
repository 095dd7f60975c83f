"""Sources of drafts against plain searches over the whole text."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.speculation.scripted_proposer import ScriptedProposer
from trencadis.core.scheduling.draft_scheduler import cut_at
from trencadis.core.spec.draft_count import AcceptanceRates, StepSeconds, VerifyShapes, choose_count, pays_together
from trencadis.core.spec.draft_proposer_interface import NO_DRAFT, DraftTokens, FirstProposal
from trencadis.core.spec.ngram_proposer import BULK, NgramIndex, NgramProposer
from trencadis.core.spec.predicted_text import PredictedText, PredictionProposer
from trencadis.core.spec.suffix_proposer import CONTEXT_BYTES, LEAST_SHARE, AnswerCounts, Owner, SuffixProposer

PAD = 9
TEXTS = st.lists(st.integers(0, 9), max_size=60)


def count_predicted(predicted: list[int], answer: list[int]) -> tuple[int, int]:
    """Predicted tokens that appeared in the answer, and those that did not."""
    text = PredictedText(predicted)
    for token in answer:
        text.accept(token)
    return text.count_accepted(), text.count_rejected()


def plain_ngram(text: list[int], shortest: int, longest: int, count: int, skipped: int) -> tuple[int, ...]:
    """What followed the longest suffix at its last occurrence, by searching the whole text."""
    for length in range(longest, shortest - 1, -1):
        suffix = text[len(text) - length :]
        if length > len(text) or skipped in suffix:
            continue
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix:
                found: list[int] = []
                for at in range(end, end + count):
                    token = text[at] if at < len(text) else found[at - len(text)]
                    if token == skipped:
                        break
                    found.append(token)
                return tuple(found)
    return ()


@given(text=TEXTS, prompt=st.integers(0, 60), longest=st.integers(2, 5), count=st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_ngram_finds_what_a_search_of_the_whole_text_finds(
    text: list[int], prompt: int, longest: int, count: int
) -> None:
    source = NgramProposer(2, longest, {PAD})
    for known in range(min(prompt, len(text)), len(text) + 1):
        expected = plain_ngram(text[:known], 2, longest, count, PAD)
        assert source.propose([*text, -1, -1], known, count).ids == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_indexed_in_one_pass_is_found_like_one_indexed_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(6) if rng.random() < 0.97 else PAD for _ in range(BULK + 400)]
    source = NgramProposer(2, 4, {PAD})
    for known in range(BULK + 100 * seed + 1, len(text)):
        assert source.propose(text, known, 4).ids == plain_ngram(text[:known], 2, 4, 4, PAD)


def test_placeholders_of_images_are_neither_matched_nor_proposed() -> None:
    index = NgramIndex(2, 4, {PAD})
    text = [1, PAD, PAD, PAD, PAD, 5, 6, 7, PAD, PAD]
    index.extend(text, len(text))
    assert index.find_suffix(text, text, len(text)) == (-1, 0)
    again = [5, 6, 7, PAD, 1, 5, 6]
    assert NgramProposer(2, 4, {PAD}).propose(again, 7, 4).ids == (7,)


def test_a_text_that_repeats_itself_is_continued_past_its_end() -> None:
    assert NgramProposer().propose([1, 2, 3, 1, 2, 3, 1, 2], 8, 7).ids == (3, 1, 2, 3, 1, 2, 3)


def test_an_index_costs_little_for_each_token_of_a_long_text() -> None:
    """20 us are allowed; a slow machine that other processes share gets five times that."""
    rng = random.Random(0)
    text = [rng.randrange(150_000) for _ in range(32_768)]
    source, start = NgramProposer(), time.perf_counter()
    source.propose(text, len(text) - 500, 4)
    assert (time.perf_counter() - start) / len(text) < 100e-6
    taken = []
    for known in range(len(text) - 500, len(text)):
        start = time.perf_counter()
        source.propose(text, known, 4)
        taken.append(time.perf_counter() - start)
    assert sorted(taken)[len(taken) // 2] < 100e-6


@given(answers=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), max_size=6))
@settings(max_examples=60, deadline=None)
def test_counts_give_the_most_frequent_continuation_of_the_longest_known_suffix(answers: list[list[int]]) -> None:
    counts, tally = AnswerCounts(), defaultdict[tuple[int, ...], Counter[int]](Counter)
    for answer in answers:
        counts.add(Owner(), answer, 0, len(answer))
        for at in range(len(answer)):
            for length in (2, 3, 4):
                if length <= at:
                    tally[tuple(answer[at - length : at])][answer[at]] += 1
    for answer in answers:
        token, length = counts.best(Owner(), answer)
        expected = next((n for n in (4, 3, 2) if n <= len(answer) and tuple(answer[-n:]) in tally), 0)
        if not expected:
            assert (token, length) == (-1, 0)
            continue
        seen = tally[tuple(answer[-expected:])]
        if len(seen) <= 4:  # further candidates replace the rarest
            share = max(seen.values()) / sum(seen.values())
            assert (length == expected and seen[token] == max(seen.values())) or share < LEAST_SHARE


def test_counts_of_tenants_and_salts_are_separate() -> None:
    counts = AnswerCounts()
    counts.add(Owner("a", "s"), [1, 2, 3, 4], 0, 4)
    assert counts.best(Owner("a", "s"), [2, 3]) == (4, 2)
    for other in (Owner("b", "s"), Owner("a", ""), Owner()):
        assert counts.best(other, [2, 3]) == (-1, 0)


def test_counts_stay_below_their_limit_and_keep_the_recent_half() -> None:
    limit = 200 * CONTEXT_BYTES
    counts, rng = AnswerCounts(limit), random.Random(1)
    for number in range(300):
        answer = [rng.randrange(1000) for _ in range(8)]
        counts.add(Owner(str(number % 3)), answer, 0, len(answer))
        assert counts.bytes <= limit + CONTEXT_BYTES * 3
        assert counts.best(Owner(str(number % 3)), answer[:-1]) == (answer[-1], 4)


def test_suffix_learns_from_answers_of_other_requests_of_its_owner() -> None:
    counts = AnswerCounts()
    first = SuffixProposer(counts, Owner("t"), 2)
    first.propose([8, 9, 1, 2, 3, 4, 5, 6], 8, 4)
    second = SuffixProposer(counts, Owner("t"), 1)
    assert second.propose([7, 2, 3], 3, 3).ids == (4, 5, 6)
    assert SuffixProposer(counts, Owner("u"), 1).propose([7, 2, 3], 3, 3) == NO_DRAFT


def test_suffix_prefers_the_longer_of_both_matches() -> None:
    counts = AnswerCounts()
    counts.add(Owner(), [1, 2, 3, 4], 0, 4)
    own = [1, 2, 3, 5, 0, 2, 3]
    assert SuffixProposer(counts, Owner(), 7).propose(own, 7, 1).ids == (5,)
    assert SuffixProposer(counts, Owner(), 8).propose([0, 2, 3, 5, 1, 2, 3, 0, 1, 2, 3][:7], 7, 1).ids == (4,)


@given(text=st.lists(st.integers(0, 50), min_size=1, max_size=80), every=st.integers(3, 12))
@settings(max_examples=60, deadline=None)
def test_a_prediction_with_replaced_tokens_is_followed(text: list[int], every: int) -> None:
    """After a replaced token the place moves on by one, so that all others are proposed."""
    predicted = [100 + token if at % every == every - 1 else token for at, token in enumerate(text)]
    source = PredictionProposer(predicted, 1)
    for at in range(len(text)):
        ids = source.propose([7, *text], 1 + at, 1).ids
        assert ids == (predicted[at],)
    wrong = sum(a != b for a, b in zip(text, predicted, strict=True))
    assert count_predicted(predicted, text) == (len(text) - wrong, wrong)


@given(data=st.data(), length=st.integers(30, 80))
@settings(max_examples=60, deadline=None)
def test_a_prediction_is_found_again_after_insertions_and_deletions(data: st.DataObject, length: int) -> None:
    text = list(range(length))
    gone, more = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    at = data.draw(st.integers(1, length - 9 - gone))  # three tokens after the change are enough to find the place
    answer = [*text[:at], *range(1000, 1000 + more), *text[at + gone :]]
    follower = PredictedText(text)
    for token in answer[:-6]:
        follower.accept(token)
    assert follower.next_ids(3) == tuple(answer[-6:-3])
    accepted, rejected = count_predicted(text, answer)
    assert accepted + rejected == length and accepted >= length - gone - 2


def test_a_lost_place_proposes_nothing() -> None:
    source = PredictionProposer([1, 2, 3, 4, 5], 0)
    assert source.propose([], 0, 2).ids == (1, 2)
    assert source.propose([9, 9], 2, 2) == NO_DRAFT
    assert source.propose([9, 9, 2, 3], 4, 9).ids == (4, 5)
    assert source.propose([9, 9, 2, 3, 4, 5], 6, 9) == NO_DRAFT


def test_the_first_source_with_a_proposal_answers() -> None:
    source = FirstProposal(
        [PredictionProposer([1], 0), ScriptedProposer(lambda text, known: known if known < 3 else -1)]
    )
    assert source.propose([], 0, 4) == DraftTokens((1,), "prediction")
    assert source.propose([5], 1, 4) == DraftTokens((1, 2), "scripted")
    assert source.propose([5, 5, 5], 3, 4) == NO_DRAFT


def test_drafts_end_before_what_ends_a_text_and_before_ids_outside_the_vocabulary() -> None:
    assert cut_at([1, 2, 0, 3], frozenset({0}), 10) == (1, 2)
    assert cut_at([1, 12, 3], frozenset(), 10) == (1,)
    assert cut_at([1, -1], frozenset(), 10) == (1,)


def test_drafts_fall_to_none_where_they_do_not_pay_and_are_tried_again() -> None:
    rates, seconds = AcceptanceRates(4), StepSeconds()
    for tokens in (1, 2, 3, 4, 5):
        seconds.learn(tokens, 0.1 * (1 + 0.2 * (tokens - 1)))
    assert choose_count(rates, seconds, 4, 1, 1.0) >= 2
    for _ in range(40):
        rates.learn(1, 0)
    found = [choose_count(rates, seconds, 4, 1, 1.0) for _ in range(100)]
    assert set(found) == {0, 1} and 1 <= sum(found) <= 60
    for _ in range(40):
        rates.learn(4, 4)
    assert choose_count(rates, seconds, 4, 1, 1.0) == 4


def test_many_rows_are_not_drafted_where_a_step_costs_as_much_as_its_tokens() -> None:
    rates, seconds = AcceptanceRates(4), StepSeconds()
    for tokens in (1, 2, 4, 32, 64, 128):
        seconds.learn(tokens, 0.05 + 0.01 * tokens)
    assert choose_count(rates, seconds, 4, 1, 1.0) >= 2
    assert choose_count(rates, seconds, 4, 128, 128.0) in (0, 1)


def test_a_launch_that_verifies_costs_the_same_for_one_draft_and_for_all() -> None:
    """Rows are padded to the plan's; on a Gaudi rows without drafts have a launch of their own."""
    mixed, apart = (VerifyShapes((1, 2, 4, 8), (2, 4, 16), 5, mixed) for mixed in (True, False))
    assert [mixed.count_tokens(rows, 0) for rows in (1, 3, 8, 20)] == [1, 4, 8, 20]
    assert [mixed.count_tokens(3, verified) for verified in (1, 2, 3)] == [20, 20, 20]
    assert [apart.count_tokens(3, verified) for verified in (1, 2, 3)] == [10 + 2, 10 + 1, 20]
    seconds = StepSeconds()
    for tokens in (1, 4, 8, 20, 80):
        seconds.learn(tokens, 0.01 * (1 + 0.02 * tokens))
    one, all_rows = ((plain, mixed.count_tokens(plain, plain)) for plain in (1, 8))
    assert pays_together(seconds, *one, 1.0, 0.5) and not pays_together(seconds, *one, 1.0, 0.05)
    assert pays_together(seconds, *all_rows, 8.0, 16.0), "all rows together pay for the launch"
    assert not pays_together(seconds, *all_rows, 8.0, 2.0), "two drafts of one row do not"
    assert not pays_together(seconds, *one, 1.0, 0.5, making=0.05), "what they take to be made counts"


def test_a_larger_step_never_counts_as_shorter() -> None:
    seconds = StepSeconds()
    seconds.learn(1, 0.2)
    seconds.learn(5, 0.1)
    assert seconds.ratio(1, 4) == 1.0 and seconds.estimate(3) >= 0.2
