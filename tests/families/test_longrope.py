"""LongRoPE: a request takes the short factors up to the trained length, and is computed again when it outgrows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families.test_same_tokens import BASE
from tests.oracles.transformers_model import assert_same
from trencadis import LLM, BeamSearchParams, SamplingParams, TokensPrompt
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.request import Request

FORM = "long from 64 tokens on"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 300, count).tolist())


def started(path: Path, **flags: Any) -> LLM:
    return LLM(str(path), **{**BASE, "block_size": 16, **flags})


def outputs(llm: LLM, *requested: tuple[int, ...]) -> list[Any]:
    return llm.generate([list(p) for p in requested], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_outgrows_the_short_factors_computes_its_keys_again(form: Any, greedy: Any, depth: int) -> None:
    """Beside others that stay short or are long from the start; each is computed again once."""
    path, requested = form("phi3", FORM), [ids(60), ids(9, 1), ids(64, 2), ids(90, 3)]
    llm = started(path, async_depth=depth)
    try:
        found = outputs(llm, *requested)
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.totals.preemptions == 2
        assert_same([(one.outputs[0].token_ids, greedy(path, p, 12)) for one, p in zip(found, requested, strict=True)])
    finally:
        llm.close()


def test_transformers_computes_its_cache_again_too(form: Any, greedy: Any, oracle: Any) -> None:
    """Its own loop with a cache gives what ours and every token anew give."""
    path, prompt = form("phi3", FORM), ids(60)
    with torch.no_grad():
        made = oracle(path).generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert_same([(made[0, 60:].tolist(), greedy(path, prompt, 12))])


def test_short_and_long_keys_are_not_shared(form: Any, greedy: Any) -> None:
    path, begin = form("phi3", FORM), ids(48)
    long, again = (*begin, *ids(30, 1)), (*begin, *ids(40, 2))
    llm = started(path)
    try:
        cached = []
        for prompt in (begin, long, again, begin):
            (one,) = outputs(llm, prompt)
            assert_same([(one.outputs[0].token_ids, greedy(path, prompt, 12))])
            cached.append(one.num_cached_tokens)
        assert cached == [0, 0, 48, 32]
    finally:
        llm.close()


def test_choices_and_beams_outgrow_them_together(form: Any, greedy: Any, oracle: Any) -> None:
    """A beam's probability is that of its tokens, each under the table of its length."""
    path, prompt = form("phi3", FORM), ids(60)
    want, model = greedy(path, prompt, 12).tokens, oracle(path)
    llm = started(path)
    try:
        both = SamplingParams(n=2, temperature=0.9, seed=1, max_tokens=12, ignore_eos=True)
        (one,) = llm.generate([list(prompt)], both, use_tqdm=False)
        (alone,) = llm.generate([list(prompt)], both, use_tqdm=False)
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in alone.outputs]
        assert outputs(llm, prompt)[0].outputs[0].token_ids == want
        (beams,) = llm.beam_search(
            [TokensPrompt(prompt_token_ids=list(prompt))], BeamSearchParams(2, 8, ignore_eos=True)
        )
        for beam in beams.sequences:
            total, tokens = 0.0, [*prompt]
            for token in beam.tokens[60:]:
                with torch.no_grad():
                    total += float(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)[token])
                tokens.append(token)
            assert len(tokens) == 68 and abs(total - beam.cum_logprob) < 1e-3
        llm.engine.scheduler.check()
    finally:
        llm.close()


def test_the_root_of_prefix_keys_knows_the_table() -> None:
    request = Request("a", [1, 2, 3, 4], SamplingParams())
    keys = []
    for long in (False, True):
        chain = BlockHashChain(request, 4, long=long)
        chain.extend([1, 2, 3, 4], 4)
        keys += chain.keys
    assert keys[0] != keys[1]
