"""Models with recurrent layers: chunks, prefixes, slots and ranks, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.test_same_tokens import BASE, CARDS, close, pairs
from tests.families.text_checkpoints import FORMS
from tests.oracles.transformers_model import assert_same
from trencadis import LLM, SamplingParams

FAMILY = "qwen3_5"
NAMES = tuple(FORMS[FAMILY])
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CASES = [
    *((FAMILY, name) for name in NAMES),
    *((family, next(iter(FORMS[family]))) for family in ("granite_hybrid", "lfm2")),
    ("nemotron_h", "a part a layer, two groups"),
]
GRANITE, LFM2, NEMOTRON = CASES[-3:]
each_case = pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: value.replace(" ", "-"))


def random_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 300, count).tolist()
    return ids


@each_case
@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_chunks_of_64_have_the_bits_of_the_whole_and_others_its_values(
    form: Any, oracle: Any, family: str, name: str, ops: str
) -> None:
    path, ids = form(family, name), random_ids(200)
    with torch.no_grad():
        want = oracle(path)(input_ids=torch.tensor([ids])).logits[0]
    harness = HandDrivenModel(path, "serving", ops)
    whole = harness.prefill(ids, 200)
    close(whole, want)
    for chunk in (64, 128):
        assert torch.equal(harness.prefill(ids, chunk), whole)
    for chunk in (7, 1):
        close(harness.prefill(ids, chunk), want)


@pytest.mark.parametrize("device", ["cuda twin", pytest.param("emulated hpu", marks=pytest.mark.long)])
def test_chunks_of_64_have_the_bits_of_the_whole_on_cards(
    form: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Log-probabilities of the prompt and of an answer that goes on from its state."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    flags, found = {**BASE, **CARDS[device], "max_num_seqs": 1, "enable_prefix_caching": False}, []
    for chunk in (256, 64):
        llm = LLM(str(form(FAMILY, NAMES[0])), **{**flags, "max_num_batched_tokens": chunk})
        try:
            (made,) = llm.generate([random_ids(200)], params, use_tqdm=False)
            tokens: list[Any] = [*(made.prompt_logprobs or ())][1:] + [*(made.outputs[0].logprobs or ())]
            found.append([{id: one.logprob for id, one in token.items()} for token in tokens])
        finally:
            llm.close()
    assert found[0] == found[1] and len(found[0]) == 203


@pytest.mark.parametrize(("family", "name"), [CASES[0], GRANITE], ids=lambda value: value.replace(" ", "-"))
def test_a_slot_may_hold_anything_before_a_prompt_begins(form: Any, family: str, name: str) -> None:
    harness = HandDrivenModel(form(family, name), "padded")
    ids = random_ids(90)
    want = harness.prefill(ids, 64)
    for layer in harness.model.persistent.recurrent:
        layer.conv.fill_(float("nan"))
        layer.state.fill_(float("nan"))
    assert torch.equal(harness.prefill(ids, 64), want)
    assert all(torch.isfinite(layer.state[1]).all() for layer in harness.model.persistent.recurrent)


def test_alone_and_among_others(form: Any, greedy: Any) -> None:
    path = form(FAMILY, NAMES[0])
    requested = [tuple(random_ids(5 + 11 * i, i)) for i in range(16)]
    assert_same(pairs(greedy, path, requested, 6, max_num_seqs=16, max_num_batched_tokens=160))
    assert_same(pairs(greedy, path, requested[3:4], 6))


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[tuple[int, ...], int | None]]:
    """Tokens, and how many tokens of the prompt were cached."""
    made = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(tuple(one.outputs[0].token_ids), one.num_cached_tokens) for one in made]


@pytest.mark.parametrize(("case", "flags"), [
    (CASES[0], {}), (CASES[0], CARDS["cuda twin"]), (GRANITE, {}), (NEMOTRON, {}),
], ids=["cpu", "cuda twin", "granite", "nemotron"])  # fmt: skip
def test_prefixes_are_shared_by_snapshots(form: Any, case: tuple[str, str], flags: dict[str, Any]) -> None:
    path, shared, flags = form(*case), random_ids(270), {**flags, "max_model_len": 512}
    prompts = [[*shared, *random_ids(150, 1 + i)] for i in range(3)]
    cold, llm = LLM(str(path), **{**BASE, **flags, "enable_prefix_caching": False}), LLM(str(path), **{**BASE, **flags})
    try:
        want = [answers(cold, [prompt])[0][0] for prompt in prompts]
        found = [answers(llm, [prompt])[0] for prompt in prompts]
        assert [tokens for tokens, _ in found] == want
        assert [cached for _, cached in found] == [0, 0, 256]  # the second one leaves a snapshot where it branches
        assert answers(llm, [prompts[0]])[0] == (want[0], 384)
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.states.pool.hits == 2
    finally:
        cold.close()
        llm.close()


def test_the_third_of_three_prompts_that_share_600_tokens_begins_after_512(form: Any) -> None:
    shared = random_ids(600)
    flags = {**BASE, "max_model_len": 1024, "hf_overrides": {"max_position_embeddings": 1024}}
    llm = LLM(str(form(FAMILY, NAMES[0])), **flags)
    try:
        found = [answers(llm, [[*shared, *random_ids(300, 1 + i)]])[0][1] for i in range(3)]
        assert found == [0, 512, 576]
    finally:
        llm.close()


def test_salts_keep_snapshots_apart(form: Any) -> None:
    llm = LLM(str(form(FAMILY, NAMES[0])), **BASE)
    ids = random_ids(200)
    try:
        prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", "a", "")]
        made = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
        assert [one.num_cached_tokens for one in made] == [0, 0, 192, 0]
        assert len({tuple(one.outputs[0].token_ids) for one in made}) == 1
        assert llm.reset_prefix_cache()
        assert answers(llm, [ids])[0][1] == 0
    finally:
        llm.close()


def test_without_a_budget_for_snapshots_nothing_is_shared(form: Any) -> None:
    llm = LLM(str(form(FAMILY, NAMES[0])), **BASE, state_snapshot_memory=0)
    try:
        prompt = random_ids(200)
        assert answers(llm, [prompt]) == answers(llm, [prompt])
        assert any("no snapshots" in note for note in llm.engine.info().notes)
    finally:
        llm.close()


def test_choices_and_beams_share_the_prompt(form: Any) -> None:
    llm = LLM(str(form(FAMILY, NAMES[0])), **BASE)
    try:
        prompt = random_ids(150)
        one = llm.generate([prompt], SamplingParams(temperature=1, max_tokens=6, seed=3, ignore_eos=True))[0]
        many = llm.generate([prompt], SamplingParams(temperature=1, max_tokens=6, seed=3, n=4, ignore_eos=True))[0]
        assert many.outputs[0].token_ids == one.outputs[0].token_ids
        llm.engine.scheduler.check()
    finally:
        llm.close()


@pytest.mark.parametrize(("flags", "line"), [
    ({"spec_tokens": 2, "spec_method": "ngram"}, "cannot be taken back"),
    ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "mtp"),
    ({"batch_invariant": True}, "recurrent layers"),
    ({"tensor_parallel_size": 4}, "key heads of recurrent layers"),
    ({"pipeline_parallel_size": 2}, "no layer with keys and values"),
])  # fmt: skip
def test_what_does_not_go_with_a_state_is_refused_in_one_line(form: Any, flags: dict[str, Any], line: str) -> None:
    from trencadis.core.errors import StartupError

    with pytest.raises(StartupError, match=line) as found:
        LLM(str(form(FAMILY, NAMES[0])), **{**BASE, **flags})
    assert "\n" not in str(found.value)


WITH_EXPERTS = ("nemotron_h", "experts, two of four groups, a shared one")
WITH_STATES_LAST = ("nemotron_h", "one KV head, biases, an MLP first")
SCANNED = tuple(FORMS["granite_hybrid"])


def test_one_group_of_heads_is_not_divided(form: Any) -> None:
    from trencadis.core.errors import StartupError

    with pytest.raises(StartupError, match="1 groups of heads of recurrent layers; use 1") as found:
        LLM(str(form("granite_hybrid", SCANNED[0])), **BASE, tensor_parallel_size=2)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("key", "value"), [
    ("mamba_n_groups", 3), ("mamba_n_heads", 7), ("mamba_d_head", 20), ("mamba_d_head", "wide"), ("mamba_d_conv", 1),
    ("time_step_limit", [0.0, 4.0]), ("time_step_limit", "none"), ("time_step_limit", [0.0, {}]),
    ("hidden_act", "gelu"),
    ("layer_types", ["linear_attention"] * 4), ("layer_types", ["conv"] * 4), ("layer_types", "all"),
    ("position_embedding_type", "learned"), ("num_local_experts", -1), ("mamba_conv_bias", 1),
    ("normalization_function", "layernorm"), ("shared_intermediate_size", 0), ("attention_multiplier", None),
])  # fmt: skip
def test_a_key_of_granite_that_is_not_served_is_named(form: Any, key: str, value: object) -> None:
    from trencadis.core.checkpoint.config_reader import load_config
    from trencadis.core.errors import StartupError

    with pytest.raises(StartupError, match=key) as found:
        load_config(form("granite_hybrid", SCANNED[0]), overrides={key: value})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("key", "value"), [
    ("layer_types", ["conv"] * 4), ("full_attn_idxs", []), ("full_attn_idxs", [4]), ("conv_bias", True),
    ("conv_L_cache", 1),
])  # fmt: skip
def test_a_key_of_lfm2_that_is_not_served_is_named(form: Any, key: str, value: object) -> None:
    from trencadis.core.checkpoint.config_reader import load_config
    from trencadis.core.errors import StartupError

    given = {key: value} | ({"layer_types": None} if key == "full_attn_idxs" else {})
    with pytest.raises(StartupError, match=key) as found:
        load_config(form("lfm2", next(iter(FORMS["lfm2"]))), overrides=given)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("key", "value"), [
    ("layers_block_type", ["linear_attention", "mlp"]), ("layers_block_type", ["full_attention", "dense"]),
    ("layers_block_type", "M*"), ("layers_block_type", []), ("layers_block_type", [{}]), ("n_groups", 3),
    ("hybrid_override_pattern", "M*X"), ("hybrid_override_pattern", 5), ("mamba_hidden_act", "gelu"),
    ("mlp_hidden_act", "mish"), ("time_step_limit", [0.0, 4.0]), ("attention_bias", True), ("residual_in_fp32", True),
    ("sliding_window", 64), ("mamba_n_groups", 2), ("conv_kernel", 1), ("mamba_num_heads", 0), ("n_group", 3),
    ("topk_group", 5), ("num_experts_per_tok", 9), ("routed_scaling_factor", 0.0), ("mlp_bias", True),
    ("moe_latent_size", -1), ("moe_intermediate_size", None), ("norm_topk_prob", 1),
])  # fmt: skip
def test_a_key_of_nemotron_that_is_not_served_is_named(form: Any, key: str, value: object) -> None:
    from trencadis.core.checkpoint.config_reader import load_config
    from trencadis.core.errors import StartupError

    given = {key: value} | ({"layers_block_type": None} if key == "hybrid_override_pattern" else {})
    with pytest.raises(StartupError, match=key) as found:
        load_config(form(*WITH_EXPERTS), overrides=given)
    assert "\n" not in str(found.value)


def test_a_pattern_of_letters_names_the_layers(form: Any) -> None:
    from trencadis.core.checkpoint.config_reader import load_config

    path = form(*WITH_EXPERTS)
    listed = load_config(path).text
    given = {"layers_block_type": None, "hybrid_override_pattern": "ME*E-"}
    assert load_config(path, overrides=given).text == listed
    old = {"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp"]}
    assert load_config(path, overrides=old).text == listed


@pytest.mark.long
@pytest.mark.parametrize(("family", "name", "flags"), [
    (FAMILY, NAMES[1], {"pipeline_parallel_size": 2}), (FAMILY, NAMES[0], {"tensor_parallel_size": 2}),
    (FAMILY, NAMES[1], {"tensor_parallel_size": 2}), ("granite_hybrid", SCANNED[1], {"tensor_parallel_size": 2}),
    (*LFM2, {"tensor_parallel_size": 2}), (*NEMOTRON, {"tensor_parallel_size": 2}),
    (*WITH_EXPERTS, {"tensor_parallel_size": 2}),
    (*WITH_STATES_LAST, {"pipeline_parallel_size": 2, "pipeline_layer_partition": "2,3"}),
], ids=[
    "stages", "ranks", "ranks-tied", "granite-ranks", "lfm2-ranks", "nemotron-ranks", "nemotron-experts-ranks",
    "nemotron-stages",
])  # fmt: skip
def test_ranks_and_stages_keep_their_states(
    form: Any, greedy: Any, family: str, name: str, flags: dict[str, Any]
) -> None:
    requested = [tuple(random_ids(20 + 30 * i, i)) for i in range(6)]
    assert_same(pairs(greedy, form(family, name), requested, 8, **flags))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("case", [CASES[0], *CASES[-3:], ("granite_hybrid", SCANNED[1])], ids=lambda case: case[1])
def test_quantised_weights_answer(form: Any, kind: str, case: tuple[str, str]) -> None:
    llm = LLM(str(form(*case)), **BASE, quantization=kind)
    try:
        assert len(answers(llm, [random_ids(100)])[0][0]) == 8
    finally:
        llm.close()


@pytest.mark.parametrize("case", [CASES[0], GRANITE, NEMOTRON], ids=lambda case: case[0])
def test_a_state_is_a_row_of_the_ledger(form: Any, case: tuple[str, str]) -> None:
    path: Path = form(*case)
    llm = LLM(str(path), **{**BASE, **CARDS["cuda twin"]})
    try:
        plan = llm.engine.info().graphs
        held = llm.engine.executor._rank.model.persistent.recurrent  # type: ignore[attr-defined]
        size = sum(t.nbytes for layer in held for t in layer if t is not None)
        assert plan is not None and dict(plan.ledger)["recurrent state"] == size
        assert sum(row.bytes for row in plan.ledger) == plan.total
    finally:
        llm.close()


CROWDED = {"num_gpu_blocks_override": 16, "block_size": 16, "max_num_seqs": 4, "max_model_len": 256}
LENGTH = 24


@pytest.mark.parametrize(("device", "case"), [
    ("cpu", CASES[0]), *(pytest.param(device, case, marks=pytest.mark.long) for device, case in (
        ("cuda twin", CASES[0]), ("emulated hpu", CASES[0]), ("cpu", CASES[-2]), ("cuda twin", CASES[-1]),
    )),
], ids=lambda value: value if isinstance(value, str) else value[0])  # fmt: skip
def test_a_preempted_sequence_goes_on_with_its_state(
    form: Any, monkeypatch: pytest.MonkeyPatch, device: str, case: tuple[str, str]
) -> None:
    """Four answers take turns in blocks for three of them: with host memory, the same tokens and no prompt twice."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    flags = {**BASE, **(CARDS[device] if device != "cpu" else {"policy": "padded"}), **CROWDED}
    prompts, found, computed = [random_ids(60 + 5 * i, i) for i in range(4)], [], []
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    for size in (0.0, 0.5):
        llm = LLM(str(form(*case)), **flags, kv_offloading_size=size)
        try:
            made = llm.generate(prompts, params, use_tqdm=False)
            found.append([one.outputs[0].token_ids for one in made])
            llm.engine.scheduler.check()
            stats = llm.engine.stats()
            assert stats.preemptions > 0 and (stats.states_resumed > 0) == bool(size)
            assert stats.states_kept >= stats.states_resumed
            computed.append(stats.prefix_queries - stats.prefix_hits)
            if size:
                assert any("states of preempted sequences" in note for note in llm.engine.info().notes)
        finally:
            llm.close()
    assert found[0] == found[1] and computed[1] < computed[0]
