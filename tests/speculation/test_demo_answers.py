"""The bundled model over conversations with images: greedy and sampled answers with drafts are those without."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.speculation.test_eagle3 import head_at
from tests.traffic.image_chats import Chat, make_conversations
from tests.traffic.predicted_answers import predict
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config

FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "batch_invariant": True,
    "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "report", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


def params_of(seed: int) -> SamplingParams:
    """Greedy for every second seed, else with every sampling field."""
    rng = random.Random(seed)
    if seed % 2:
        return SamplingParams(temperature=0.0, max_tokens=24, logprobs=rng.choice([None, 2]))
    return SamplingParams(
        temperature=rng.choice([0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 20]),
        min_p=rng.choice([0.0, 0.05]), presence_penalty=rng.choice([0.0, 0.4]), seed=seed,
        frequency_penalty=rng.choice([0.0, 0.3]), repetition_penalty=rng.choice([1.0, 1.1]), max_tokens=24,
        logit_bias=rng.choice([None, {40: 2.0}]), min_tokens=rng.choice([0, 8]), stop=rng.choice([[], ["a"]]),
    )  # fmt: skip


def answers(
    chats: list[Chat], together: bool, tools: bool = False, predicted: list[list[int]] | None = None, **flags: Any
) -> tuple[list[Any], int]:
    """Token ids, texts, ends and log-probabilities of all answers, and the drafts that were accepted."""
    llm = LLM(**{**FLAGS, **flags})
    if predicted is not None:
        predict(llm, predicted)
    try:
        params = [params_of(seed) for seed in range(len(chats))]
        more: dict[str, Any] = {"tools": [TOOL]} if tools else {}
        if together:
            outputs = llm.chat(chats, params, use_tqdm=False, **more)
        else:
            outputs = [llm.chat(one, p, use_tqdm=False, **more)[0] for one, p in zip(chats, params, strict=True)]
        llm.engine.scheduler.check()
        found = [
            (out.token_ids, out.text, out.finish_reason, out.stop_reason, repr(out.logprobs))
            for output in outputs
            for out in output.outputs
        ]
        return found, llm.engine.scheduler.totals.spec_accepted
    finally:
        llm.close()


def compare(chats: list[Chat], together: bool, cases: list[dict[str, Any]], **more: Any) -> None:
    plain, none = answers(chats, together, speculation=False, **more)
    assert not none
    for case in cases:
        flags: dict[str, Any] = {**case, **more}
        if case["spec_method"] == "prediction":
            flags.update(spec_method="ngram", predicted=[one[0] for one in plain])
        drafted, accepted = answers(chats, together, spec_always=True, **flags)
        assert drafted == plain, case
        print(f"{len(chats)} conversations, together {together}, {case}: {accepted} drafts accepted")
        assert accepted or case["spec_method"] == "eagle3"


@pytest.mark.parametrize("together", [False, True])
def test_some_conversations_have_equal_answers(together: bool) -> None:
    chats = make_conversations(range(6), high=224)
    ngram = {"spec_method": "ngram", "spec_tokens": 4, "ngram_prompt_lookup_min": 1}
    compare(chats, together, [ngram, {"spec_method": "prediction", "spec_tokens": 3}])


MANY = int(os.environ.get("TRENCADIS_TEST_REQUESTS", "250"))
FIRST = int(os.environ.get("TRENCADIS_TEST_SEED", "0"))
"""Conversations of the long run, which may be made in pieces, and the number of the first."""


def write_random_head(folder: Path) -> Path:
    """Writes a head for the demo whose drafts are nearly always wrong."""
    text = load_config(demo_path()).text
    rows = {"q": text.heads, "k": text.kv_heads, "v": text.kv_heads}
    shapes = {
        "fc": (text.hidden, 3 * text.hidden), "lm_head": (text.vocab, text.hidden), "norm": (text.hidden,),
        "midlayer.self_attn.o_proj": (text.hidden, text.heads * text.head_dim),
        "midlayer.mlp.gate_proj": (64, text.hidden), "midlayer.mlp.up_proj": (64, text.hidden),
        "midlayer.mlp.down_proj": (text.hidden, 64),
        **{f"midlayer.self_attn.{n}_proj": (count * text.head_dim, 2 * text.hidden) for n, count in rows.items()},
        **{f"midlayer.{n}": (text.hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    weights = {f"{name}.weight": 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return head_at(
        folder, weights, hidden_size=text.hidden, num_attention_heads=text.heads, num_key_value_heads=text.kv_heads,
        head_dim=text.head_dim, intermediate_size=64, vocab_size=text.vocab, draft_vocab_size=text.vocab,
        max_position_embeddings=text.max_positions,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("source", ["ngram", "suffix", "prediction", "draft_model", "eagle3"])
def test_a_thousand_conversations_have_equal_answers(
    source: str, tools: bool, together: bool, tmp_path: Path
) -> None:  # fmt: skip
    """Drafts of the demo itself are nearly always right, those of a random head nearly always wrong.

    The conversations that are answered together go without a prefix cache where no model drafts.
    """
    model = {"draft_model": demo_path, "eagle3": lambda: write_random_head(tmp_path / "head")}
    own: dict[str, Any] = {"spec_model": str(model[source]())} if source in model else {}
    if source == "ngram":  # short answers repeat few pairs
        own = {"ngram_prompt_lookup_min": 1}
    cases = [{"spec_method": source, "spec_tokens": k, **own} for k in (1, 3, 7)]
    more = {"enable_prefix_caching": False} if together and source not in model else {}
    compare(make_conversations(range(FIRST, FIRST + MANY), high=224), together, cases, tools=tools, **more)
