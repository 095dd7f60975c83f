"""Encoders: what their texts become, what is refused, and that a mistake in what a family says of itself shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families.pooled.encoders import ENCODERS, VOCAB, encoder, first_of, pair_logit
from tests.families.pooled.pooled_case import loaded
from tests.hostile.altered_config import GONE, altered, verdict
from tests.pooling.oracle import LEAST_COSINE, cosine
from trencadis import LLM
from trencadis.backends.conformance.check_model.checkpoint_checks import CheckedModel, run
from trencadis.backends.conformance.check_model.cpu_reference_model import CpuReferenceModel
from trencadis.backends.cpu import pick_policy
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.model_config import PRE, RMS, ImageNeeds, ModelConfig
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine.startup_plan import shape_limits
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.memory.memory_estimator import MemoryEstimator

BASE: dict[str, Any] = dict(dtype="float32", max_num_seqs=4, max_num_batched_tokens=256, kv_cache_memory_bytes=8 << 20)
TEXTS = ("Where is Paris?", "the red circles", "what is a \u00c9t\u00e9, 2026!", "a  b", "zz ~ \u4e2d")
PAIRS = (("where is paris", "paris is a circle, the red"), ("a", "what!" * 9), ("The red " * 12, "is it?"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = ENCODERS[name].make(tmp_path_factory.mktemp("encoder") / "model")
        return folders[name]

    return folder


@pytest.mark.parametrize("name", ["bge", "bge-m3"])
def test_texts_are_read_and_cut_as_transformers_does(name: str, made: Any) -> None:
    """WordPiece and Unigram; what stands around a text stays when it is cut, on either side."""
    from transformers import AutoTokenizer

    path = made(name)
    reference = AutoTokenizer.from_pretrained(path)
    with LLM(path, **BASE) as llm:
        service, wait = llm.llm_engine.service, llm.llm_engine.wait
        for text in TEXTS:
            (output,) = llm.embed(text, use_tqdm=False)
            ids = reference(text)["input_ids"]
            assert output.prompt_token_ids == ids
            assert cosine(output.outputs.embedding, first_of(path, ids)) > LEAST_COSINE
            for side in ("right", "left"):
                reference.truncation_side = side
                for most in (3, 6, len(ids)):
                    cut = wait(service.make_raw_prompt(text, truncate=most, truncation_side=side)).tokens
                    assert cut == reference(text, truncation=True, max_length=most)["input_ids"]
        long = "red circle " * 200
        reference.truncation_side = "right"
        (output,) = llm.embed(long, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
        assert output.prompt_token_ids == reference(long, truncation=True, max_length=160)["input_ids"]
        with pytest.raises(BadRequest, match="160"):
            llm.embed(long, use_tqdm=False)


@pytest.mark.parametrize("name", ["BERT reranker", "bge-reranker"])
def test_pairs_score_as_in_transformers(name: str, made: Any) -> None:
    """Joined as the checkpoint joins them, with token types where it has them; cut, the longer text gives way."""
    path = made(name)
    with LLM(path, **BASE) as llm:
        together = llm.score([q for q, _ in PAIRS], [d for _, d in PAIRS], use_tqdm=False)
        for pair, output in zip(PAIRS, together, strict=True):
            logit, ids = pair_logit(path, pair)
            assert output.prompt_token_ids == ids
            assert abs(output.outputs.score - 1 / (1 + np.exp(-logit))) < 1e-5
            for most in (9, 14, 15):
                logit, ids = pair_logit(path, pair, truncation=True, max_length=most)
                (cut,) = llm.score(*pair, truncate_prompt_tokens=most, use_tqdm=False)
                assert cut.prompt_token_ids == ids
                assert abs(cut.outputs.score - 1 / (1 + np.exp(-logit))) < 1e-5
        with pytest.raises(BadRequest, match="generate"):
            llm.generate("a")


def test_padding_ids_in_a_prompt_take_no_position(made: Any) -> None:
    """As in transformers, which counts the others alone."""
    path = made("bge-m3")
    with LLM(path, **BASE) as llm:
        ids = [0, 9, 1, 1, 30, 1, 40, 2]
        (output,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        assert cosine(output.outputs.embedding, first_of(path, ids)) > LEAST_COSINE


def test_a_prompt_is_one_chunk_and_no_prefix_is_reused(made: Any) -> None:
    """Among others that fill the step, twice, so that cached blocks would be met."""
    path, rng = made("bge"), np.random.default_rng(0)
    requested = [[int(t) for t in rng.integers(5, 300, n)] for n in (150, 90, 60, 159, 1, 17)] * 2
    with LLM(path, **{**BASE, "max_num_batched_tokens": 160, "num_gpu_blocks_override": 14}) as llm:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in requested], use_tqdm=False)
        llm.engine.scheduler.check()
    for ids, output in zip(requested, outputs, strict=True):
        assert output.num_cached_tokens == 0
        assert cosine(output.outputs.embedding, first_of(path, ids)) > LEAST_COSINE


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_num_batched_tokens": 100}, "must be at least --max-model-len"),
        ({"max_model_len": 161}, "161"),
        ({"runner": "generate"}, "no output head; --runner pooling"),
        ({"convert": "none", "pooler_config": {"pooling_type": "MAX"}}, "implemented: LAST, MEAN, CLS, ALL, STEP"),
    ],
)
def test_what_an_encoder_cannot_do_is_one_line(options: dict[str, Any], line: str, made: Any) -> None:
    with pytest.raises(StartupError) as refused:
        LLM(made("bge"), **{**BASE, **options})
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_step_holds_the_longest_prompt_unless_a_flag_says_otherwise(made: Any) -> None:
    config = load_model_config(EngineConfig(str(made("bge"))))
    long = replace(config, text=replace(config.text, max_positions=8192))
    policy = pick_policy("")
    assert shape_limits(EngineConfig("m"), long, policy, ImageNeeds()).max_tokens == 8192
    assert shape_limits(EngineConfig("m"), config, policy, ImageNeeds()).max_tokens > 160
    assert shape_limits(EngineConfig("m", max_num_batched_tokens=99), long, policy, ImageNeeds()).max_tokens == 99


def rows(config: ModelConfig, ids: Sequence[int]) -> torch.Tensor:
    return CpuReferenceModel(config).logits(list(ids), len(ids))


def wanted(path: Path, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = loaded("AutoModel", path)(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return found


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("bge", {"causal": True}),
    "another gelu": ("bge", {"activation": "gelu_tanh"}),
    "gelu for its tanh": ("MiniLM, old names", {"activation": "gelu"}),
    "positions off by one": ("bge", {"position_offset": 1}),
    "norms before": ("bge", {"norm_placement": PRE}),
    "another epsilon": ("bge", {"eps": 1e-3}),
    "the mean left in": ("bge", {"norm": RMS}),
    "rotary besides": ("bge", {"rotary": True, "rope_theta": 1e4}),
    "offset 0": ("bge-m3", {"position_offset": 0}),
    "offset of the padding id": ("bge-m3", {"position_offset": 1}),
    "causal positions and all": ("bge-m3", {"causal": True}),
    "scores scaled": ("bge-m3", {"scale": 1.0}),
    "a final norm": ("bge-m3", {"final_norm": True}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, made: Any) -> None:
    name, wrong = MISTAKES[mistake]
    path, ids = made(name), [int(t) for t in np.random.default_rng(1).integers(5, 300, 60)]
    config = load_model_config(EngineConfig(str(path)))
    want = wanted(path, ids)
    off = [float((rows(config, ids) - want).abs().max() / want.abs().max())]
    changed = replace(config, text=replace(config.text, **wrong))
    assert changed.text != config.text
    try:
        off.append(float((rows(changed, ids) - want).abs().max() / want.abs().max()))
    except StartupError:  # a weight that the mistake needs is not there
        off.append(1.0)
    assert off[0] < 1e-6 and off[1] > 5e-5, off


def test_a_norm_of_the_embeddings_that_is_dropped_shows(made: Any, monkeypatch: Any) -> None:
    """Or a layer's two norms swapped, or a token type that is forgotten."""
    path, ids = made("bge"), [*range(9, 50)]
    config, want = load_model_config(EngineConfig(str(path))), wanted(path, ids)
    take = CheckpointSource.take
    for reference, ours in (
        ("layers.0.input_layernorm", "layers.0.post_attention_layernorm"),
        ("embed_norm", "layers.0.input_layernorm"),
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias"),
    ):

        def swapped(self: Any, name: str, shape: Any, a: str = reference, b: str = ours) -> Any:
            return take(self, name.replace(a, b), shape)

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointSource, "take", swapped)
            patch.setattr(
                CheckpointSource, "shard", lambda s, n, sh, d, i, j, f=swapped: f(s, n, sh).narrow(d, i, j - i)
            )
            assert float((rows(config, ids) - want).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_by_formula_are_the_models_bytes(name: str, made: Any) -> None:
    config = load_model_config(EngineConfig(str(made(name))))
    model = CpuReferenceModel(config).model
    frequencies = model.enter.rotary.nbytes()
    assert MemoryEstimator(config, itemsize=4).weights() == model.nbytes() + frequencies


def test_check_model_passes(made: Any) -> None:
    """What needs an output head or chunks is skipped, and said to be."""
    path = made("bge-reranker")
    results = {r.name: r for r in run(CheckedModel(path, path)).results}
    assert not [r for r in results.values() if r.status == "fail"]
    done = {n for n, r in results.items() if r.status == "pass"}
    assert {"config", "weights", "ledger", "parts", "logits.whole", "ranks"} <= done, results


KEYS: list[tuple[str, Any, str]] = [
    ("vocab_size", 0, "refused"), ("vocab_size", 1000, "refused"), ("hidden_size", 128, "refused"),
    ("hidden_size", 63, "refused"), ("num_attention_heads", 2, "right"), ("num_attention_heads", 5, "refused"),
    ("num_attention_heads", 64, "refused"), ("num_hidden_layers", 1, "right"), ("num_hidden_layers", 3, "refused"),
    ("intermediate_size", 100, "refused"), ("intermediate_size", GONE, "refused"), ("hidden_act", "gelu_new", "right"),
    ("hidden_act", "relu", "right"), ("hidden_act", "silu", "right"), ("hidden_act", "mish", "refused"),
    ("hidden_act", None, "refused"), ("hidden_act", GONE, "right"), ("layer_norm_eps", 1e-3, "right"),
    ("layer_norm_eps", 0, "refused"), ("layer_norm_eps", "small", "refused"), ("layer_norm_eps", GONE, "right"),
    ("max_position_embeddings", 100, "refused"), ("max_position_embeddings", 2, "refused"),
    ("type_vocab_size", 3, "refused"), ("type_vocab_size", 0, "refused"), ("is_decoder", True, "refused"),
    ("add_cross_attention", True, "refused"), ("position_embedding_type", "relative_key", "refused"),
    ("position_embedding_type", "absolute", "right"), ("attention_probs_dropout_prob", 0.5, "right"),
    ("hidden_dropout_prob", 0.5, "right"), ("classifier_dropout", 0.5, "right"), ("initializer_range", 9.0, "right"),
    ("tie_word_embeddings", False, "right"), ("an_unknown_key", 1, "right"), ("architectures", ["Bloom"], "refused"),
    ("model_type", "gpt2", "refused"), ("use_cache", False, "right"), ("dtype", "int8", "refused"),
    ("pad_token_id", 7, "right"),
]  # fmt: skip


def problems(source: Path, tmp_path: Path, picked: list[tuple[str, Any, str]]) -> list[str]:
    lines, ids = [], [int(t) for t in np.random.default_rng(4).integers(10, 300, 40)]
    for i, (key, value, expected) in enumerate(picked):
        path = altered(source, tmp_path / str(i), "config.json", key, value)

        def ours(path: Path = path) -> torch.Tensor:
            return rows(load_model_config(EngineConfig(str(path))), ids)

        def reference(path: Path = path) -> torch.Tensor:
            return wanted(path, ids)

        found = verdict(ours, reference, key)
        if found != expected:
            lines.append(f"{key} = {'(none)' if value is GONE else value!r}: {found}, expected: {expected}")
    return lines


def sources(tmp_path: Path) -> dict[str, Path]:
    return {kind: encoder(tmp_path / kind, kind) for kind in ("BertModel", "XLMRobertaModel")}


def test_a_sample_of_altered_keys(tmp_path: Path) -> None:
    picked = np.random.default_rng(2).permutation(len(KEYS))[:8]
    for at, source in enumerate(sources(tmp_path).values()):
        (tmp_path / f"cases{at}").mkdir()
        assert not problems(source, tmp_path / f"cases{at}", [KEYS[i] for i in picked[4 * at : 4 * at + 4]])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["BertModel", "XLMRobertaModel"])
def test_every_altered_key(kind: str, tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()
    found = problems(sources(tmp_path)[kind], tmp_path / "cases", KEYS)
    print(f"\n{kind}: {len(KEYS)} altered keys, {len(found)} wrong")
    assert VOCAB and not found, "\n".join(found)
