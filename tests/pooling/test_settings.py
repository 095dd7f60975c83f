"""Which pooling a checkpoint and the flags ask for, and what they are refused for; values made of pooled ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.checkpoint.pooling_description import Pooling
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import resolve_settings
from trencadis.server.protocol.pooler_output import (
    compute_pair_score,
    cosine_similarity,
    finish_pooled,
    read_raw_values,
)
from trencadis.server.protocol.pooling_params import PoolingParams

MATRYOSHKA = {"matryoshka_dimensions": [8, 16]}
FILES = ("modules.json", "config.json", "1_Pooling/config.json")


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``model("qwen2", modules=["Pooling", "Normalize"], pooling={...}, config={...})``: a copy with these files."""

    def make(
        kind: str, modules: Any = None, pooling: dict[str, Any] | None = None, config: dict[str, Any] | None = None,
        copy: str = "copy",
    ) -> Path:  # fmt: skip
        path = tmp_path / copy
        shutil.copytree(checkpoint(kind), path)
        if modules is not None:
            names = ["Transformer", *modules]
            listed = [{"type": f"sentence_transformers.models.{n}", "path": "1_Pooling"} for n in names]
            (path / "modules.json").write_text(json.dumps(listed))
        if pooling is not None:
            (path / "1_Pooling").mkdir()
            (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        held = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**held, **(config or {})}))
        return path

    return make


def pooling_of(path: Path, **flags: Any) -> Pooling | None:
    return load_model_config(EngineConfig(str(path), **flags)).pooling


def test_a_chat_model_generates_unless_it_is_asked_to_pool(model: Callable[..., Path]) -> None:
    path = model("qwen2")
    assert pooling_of(path) is None and pooling_of(path, task="generate") is None
    assert pooling_of(path, runner="pooling") == pooling_of(path, convert="embed") == Pooling()
    assert pooling_of(path, task="embed") == Pooling()


@pytest.mark.parametrize(
    ("modules", "pooling", "wanted"),
    [
        (["Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", False)),
        (["Pooling", "Normalize"], {"pooling_mode_lasttoken": True, "include_prompt": True}, ("last", True)),
        (["Pooling", "Normalize"], {"pooling_mode": "cls"}, ("first", True)),
    ],
)
def test_files_of_sentence_transformers_say_how(
    modules: list[str], pooling: dict[str, Any], wanted: Any, model: Callable[..., Path]
) -> None:
    path = model("qwen2", modules, pooling)
    found = pooling_of(path)
    assert found is not None and (found.kind, found.normalize) == wanted
    requested = pooling_of(path, pooler_config={"pooling_type": "last", "normalize": True})
    assert requested is not None and (requested.kind, requested.normalize) == ("last", True), "flags win"
    assert pooling_of(path, runner="generate") is None


def test_labels_and_activations_come_from_the_config(model: Callable[..., Path]) -> None:
    config = {"id2label": {"1": "no", "0": "yes"}, "num_labels": 2, "problem_type": "multi_label_classification"}
    path = model("classifier", config=config)
    found = pooling_of(path)
    assert found is not None and (found.labels, found.activation, found.classes) == (("yes", "no"), "sigmoid", 2)
    one = pooling_of(path, hf_overrides={"num_labels": 1, "id2label": {"0": "fit"}, "problem_type": None})
    assert one is not None and (one.activation, one.scores, one.labels) == ("sigmoid", True, ("fit",))


def test_matryoshka_sizes_come_from_the_config_or_a_flag(model: Callable[..., Path]) -> None:
    path = model("qwen2", config={"is_matryoshka": True})
    found = pooling_of(path, runner="pooling", pooler_config={"dimensions": 8})
    assert found is not None and (found.dimensions, found.default_dimensions) == ((), 8)
    listed = pooling_of(path, runner="pooling", hf_overrides={"matryoshka_dimensions": [8, 16]})
    assert listed is not None and listed.dimensions == (8, 16)


@pytest.mark.parametrize(
    ("files", "flags", "line"),
    [
        ({}, {"runner": "generate", "convert": "embed"}, "contradicts --runner generate"),
        ({}, {"task": "embed", "runner": "generate"}, "--task embed contradicts --runner generate"),
        ({}, {"pooler_config": {"pooling_type": "LAST"}}, "add --runner pooling"),
        ({}, {"hf_overrides": {"rms_norm_eps": "small"}}, 'rms_norm_eps is "small"'),
        ({}, {"runner": "pooling", "pooler_config": {"pooling_type": "MAX"}}, "implemented: LAST, MEAN, CLS, ALL"),
        ({}, {"runner": "pooling", "pooler_config": {"step_tag_id": "x"}}, "'step_tag_id' is \"x\"; known"),
        ({}, {"runner": "pooling", "pooler_config": {"pooling_type": "STEP"}}, "STEP needs step_tag_id"),
        ({}, {"task": "reward", "runner": "generate"}, "--task reward contradicts --runner generate"),
        ({}, {"runner": "pooling", "pooler_config": {"dimensions": 8}}, "needs a Matryoshka checkpoint"),
        ({}, {"runner": "pooling", "convert": "none"}, "--convert embed or classify"),
        ({}, {"runner": "pooling", "pooler_config": {"task": "classify"}}, "does embed and token_embed (--convert"),
        ({}, {"runner": "pooling", "pooler_config": {"task": "nonsense"}}, 'task is "nonsense"; this server does'),
        ({}, {"runner": "pooling", "pooler_config": {"seq_pooling_type": "ALL"}}, "implemented: LAST, MEAN, CLS"),
        ({}, {"runner": "pooling", "pooler_config": {"tok_pooling_type": "STEP"}}, "STEP needs step_tag_id"),
        (
            {},
            {"runner": "pooling", "pooler_config": {"pooling_type": "LAST", "seq_pooling_type": "CLS"}},
            "pooling_type and seq_pooling_type say the same",
        ),
        ({}, {"runner": "pooling", "pooler_config": {"logit_sigma": 2}}, "'logit_sigma' is 2; known"),
        ({"kind": "classifier"}, {"pooler_config": {"logit_sigma": 0}}, "logit_sigma (not 0)"),
        ({"kind": "classifier"}, {"pooler_config": {"enable_chunked_processing": True}}, "of embeddings"),
        ({"kind": "classifier"}, {"pooler_config": {"returned_token_ids": [1]}}, "classifier_from_token"),
        ({}, {"runner": "pooling", "pooler_config": {"max_embed_len": 10**6}}, "enable_chunked_processing embeds"),
        ({}, {"runner": "pooling", "pooler_config": {"max_embed_len": 0}}, "'max_embed_len' is 0; known"),
        ({}, {"convert": "classify", "hf_overrides": {"classifier_from_token": ["zzzz"]}}, "zzzz are no tokens"),
        ({"modules": ["Pooling", "Dense"], "pooling": {"pooling_mode": "mean"}}, {}, "has the module Dense"),
        (
            {"modules": ["Pooling"], "pooling": {"pooling_mode_max_tokens": True}},
            {},
            "pools by pooling_mode_max_tokens",
        ),
        ({"modules": ["Pooling"]}, {}, "which does not exist"),
        ({"config": {"is_causal": False}}, {}, "implemented: causal attention"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    files: dict[str, Any], flags: dict[str, Any], line: str, model: Callable[..., Path]
) -> None:
    with pytest.raises(StartupError) as refused:
        pooling_of(model(**{"kind": "qwen2", **files}), **flags)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_class_head_does_not_generate(model: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="no output head; --runner pooling"):
        pooling_of(model("classifier"), runner="generate")


def test_reward_models_pool_every_token(model: Callable[..., Path]) -> None:
    path = model("classifier", config={"architectures": ["Qwen2ForProcessRewardModel"]})
    steps = pooling_of(path)
    assert steps is not None and steps.tasks == ("token_classify",) and not steps.scores
    assert (steps.kind, steps.inner, steps.biased, steps.classes, steps.step_tag) == ("all", "relu", True, 2, 151651)
    assert steps.line == "token_classify: every token with id 151651, linear, relu, linear, 2 classes, softmax"
    every = pooling_of(path, pooler_config={"pooling_type": "ALL"})
    assert every is not None and every.step_tag == -1
    with pytest.raises(StartupError, match="pooling_type MEAN needs a head of one linear"):
        pooling_of(path, pooler_config={"pooling_type": "MEAN"})


def test_the_keys_of_pooler_config_act(model: Callable[..., Path]) -> None:
    path = model("qwen2")

    def given(**keys: Any) -> Pooling:
        made = pooling_of(path, runner="pooling", pooler_config=keys)
        assert made is not None
        return made

    assert given(task="embed") == Pooling() and given(task="token_embed").tasks == ("token_embed",)
    assert given(seq_pooling_type="MEAN").kind == "mean" and given(seq_pooling_type=None) == Pooling()
    steps = given(tok_pooling_type="STEP", step_tag_id=7)
    assert (steps.kind, steps.step_tag) == ("last", 7)
    long = given(enable_chunked_processing=True, max_embed_len=10**6)
    assert (long.chunked, long.longest) == (True, 10**6) and not given(max_embed_len=4).chunked
    path = model("classifier", copy="other")
    head = pooling_of(path, pooler_config={"logit_mean": 1.5, "logit_sigma": 2, "task": "classify"})
    assert head is not None and (head.bias, head.sigma, head.kind) == (1.5, 2.0, "last")
    older = pooling_of(path, pooler_config={"logit_bias": 1.5, "logit_scale": 0.5})
    assert older == head
    tokens = pooling_of(path, pooler_config={"task": "token_classify"})
    assert tokens is not None and tokens.tasks == ("token_classify",)


@pytest.mark.parametrize("flag", ["task", "convert"])
def test_task_reward_takes_every_token_of_any_model(flag: str, model: Callable[..., Path]) -> None:
    head = pooling_of(model("classifier"), **{flag: "reward"})
    assert head is not None and (head.kind, head.classes, head.activation) == ("all", 3, "identity")


def test_the_line_says_what_was_chosen(model: Callable[..., Path]) -> None:
    path = model("qwen2", ["Pooling"], {"pooling_mode": "mean"})
    found = pooling_of(path)
    assert found is not None and found.line == "embed: the mean of all tokens, not normalised"
    requested = pooling_of(path, pooler_config={"pooling_type": "last", "normalize": True}, hf_overrides=MATRYOSHKA)
    assert requested is not None and requested.line == "embed: the last token, length 1, sizes 8, 16"
    words = pooling_of(path, convert="classify", hf_overrides={"classifier_from_token": ["a", "b"]})
    assert words is not None
    assert words.line == "classify: the last token, the head's rows of 'a', 'b', 2 classes, softmax"


def test_the_flags_have_vllms_names() -> None:
    words = ["--model", "m", "--runner", "pooling", "--convert", "embed", "--override-pooler-config"]
    made = resolve_settings(
        command_line_parser.parse([*words, '{"pooling_type": "MEAN", "normalize": false}']), {}
    ).engine
    assert (made.runner, made.convert) == ("pooling", "embed")
    assert made.pooler_config == {"pooling_type": "MEAN", "normalize": False}
    assert (
        resolve_settings(command_line_parser.parse(["--model", "m", "--task", "score"]), {}).engine.task == "classify"
    )


def test_values_are_cut_then_normalised_and_scores_activated() -> None:
    raw = np.array([3.0, 4.0, 12.0])
    assert finish_pooled(raw, Pooling(dimensions=()), PoolingParams(dimensions=2)).tolist() == pytest.approx([0.6, 0.8])
    assert finish_pooled(raw, Pooling(), PoolingParams(normalize=False)).tolist() == [3, 4, 12]
    assert finish_pooled(0 * raw, Pooling(), PoolingParams()).tolist() == [0, 0, 0]
    classes = Pooling("classify", classes=3, activation="sigmoid", bias=3)
    assert finish_pooled(raw, classes, PoolingParams()).tolist() == pytest.approx([0.5, 0.7310586, 0.9998766])
    scaled = Pooling("classify", classes=3, activation="identity", bias=3, sigma=2)
    assert finish_pooled(raw, scaled, PoolingParams()).tolist() == [0, 0.5, 4.5]
    assert compute_pair_score(raw[-1:], replace(scaled, classes=1), PoolingParams()) == 4.5
    huge = Pooling("classify", classes=2)
    assert finish_pooled(np.array([1e4, -1e4]), huge, PoolingParams()).tolist() == [1, 0], "no overflow"
    rows = np.array([[3.0, 4.0], [0.0, 2.0]])
    assert finish_pooled(rows, Pooling(kind="all"), PoolingParams()).ravel().tolist() == pytest.approx([0.6, 0.8, 0, 1])
    steps = Pooling("classify", "all", classes=2, step_tag=9)
    sent = np.arange(6, dtype="<f4").tobytes()
    assert read_raw_values(sent, steps, PoolingParams(), [9, 8, 9]).tolist() == [[0, 1], [4, 5]]
    words = Pooling("classify", classes=3, label_tokens=(1, 2, 3))
    assert compute_pair_score(np.log([1.0, 1.0, 2.0]), words, PoolingParams()) == pytest.approx(0.5)
    assert compute_pair_score(raw[:1], Pooling("classify", classes=1), PoolingParams(use_activation=False)) == 3
    assert cosine_similarity(raw, 0 * raw) == 0 and cosine_similarity(raw, -raw) == pytest.approx(-1)


def test_parameters_that_are_not_built_are_refused() -> None:
    for name, value in {"requires_token_ids": True, "extra_kwargs": {"a": 1}, "truncate_prompt_tokens": 0}.items():
        with pytest.raises(BadRequest) as refused:
            PoolingParams(**{name: value})  # type: ignore[arg-type]
        assert refused.value.param == name
