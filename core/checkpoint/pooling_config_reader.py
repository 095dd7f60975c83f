"""Decides whether a configuration pools, and how: from flags, the files of sentence-transformers, then config.json.

Torch-free. Names of keys are vLLM's (``--pooler-config``, ``--hf-overrides``) and sentence-transformers'.

Looks up the ids of a chat model's answer words (yes, no) in tokenizer.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.family import CLASSIFY as CLASS_HEAD
from trencadis.core.checkpoint.family import GENERATE, ClassHead
from trencadis.core.checkpoint.json_fields import format_value, read_json
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.pooling_description import (
    ALL,
    CLASSIFY,
    EMBED,
    FIRST,
    IDENTITY,
    LAST,
    MEAN,
    SIGMOID,
    SOFTMAX,
    TOKEN_TASKS,
    Pooling,
)
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.kv_cache_format import FP8, INT8, KVFormat, parse_kv_format


class LabelTokens(NamedTuple):
    """Words that an answer may begin with, and their token ids."""

    words: tuple[str, ...]
    ids: tuple[int, ...]


def label_tokens(folder: Path, choices: Sequence[Sequence[str]]) -> LabelTokens:
    """Returns the first of ``choices`` whose words all are single tokens of the vocabulary, without a preceding blank.

    Raises:
        StartupError: there is no vocabulary, or every choice has a word that is not a single token.
    """
    model = (read_json(folder / "tokenizer.json") or {}).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise StartupError(f"--convert classify reads label tokens from {folder / 'tokenizer.json'}, which has none")
    for words in choices:
        found = (vocab.get(w.replace(" ", "\u0120"), vocab.get(w.replace(" ", "\u2581"))) for w in words)
        ids = tuple(one for one in found if isinstance(one, int))
        if len(ids) == len(words):
            return LabelTokens(tuple(words), ids)
    shown = ", ".join(choices[0])[:80]
    raise StartupError(
        f"{shown} are no tokens of {folder.name}; name the answers' tokens with "
        """--hf-overrides '{"classifier_from_token": ["no", "yes"]}'"""
    )


KINDS = {"LAST": LAST, "MEAN": MEAN, "CLS": FIRST, "ALL": ALL, "STEP": ALL}
SEQUENCE_KINDS = {"LAST": LAST, "MEAN": MEAN, "CLS": FIRST}
CONTRADICTIONS = (
    ("pooling_type", "seq_pooling_type"), ("pooling_type", "tok_pooling_type"), ("logit_bias", "logit_mean"),
    ("logit_scale", "logit_sigma"),
)  # fmt: skip
"""Pairs of keys of ``--pooler-config`` of which one may be given."""
POOLER_KEYS = (
    "task, pooling_type (LAST, MEAN, CLS, ALL, STEP), seq_pooling_type, tok_pooling_type, step_tag_id, normalize, "
    "use_activation; of embeddings dimensions, enable_chunked_processing (true or false), max_embed_len; of classes "
    "logit_mean, logit_sigma (not 0)"
)
REWARD = "reward"
"""A value of ``--convert``: scores for every token."""
MODES = {
    "pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": FIRST,
    "lasttoken": LAST, "mean": MEAN, "cls": FIRST,
}  # fmt: skip
PROBLEMS = {"regression": IDENTITY, "multi_label_classification": SIGMOID, "single_label_classification": SOFTMAX}
WORDS = (("no", "yes"), ("No", "Yes"))
"""Answers with which a chat model judges a pair.

The first tuple whose words are tokens is used, and its last word means a match.
"""

POOLING_KEYS = (
    "classifier_from_token",
    "is_matryoshka",
    "matryoshka_dimensions",
    "id2label",
    "num_labels",
    "problem_type",
)
"""Keys of ``--hf-overrides`` that are refused unless the server pools."""

MOST_CLASSES = 65536


class StoredPooling(NamedTuple):
    """Pooling settings from the files of sentence-transformers."""

    kind: str
    normalize: bool


def load_model_config(config: EngineConfig) -> ModelConfig:
    """Loads the configuration of the model in ``config.model``, a local folder, with its pooling and KV cache format.

    Raises:
        StartupError: see ``load_config``; or the checkpoint does not support what the flags request.
    """
    path = Path(config.model)
    model = load_config(path, config.quantization, _early_overrides(config, path))
    text = dataclasses.replace(model.text, kv=requested_kv_format(config, model))
    if config.disable_sliding_window and text.window:
        text = dataclasses.replace(text, max_positions=min(text.max_positions, text.window))
    longest = config.max_model_len or text.max_positions
    if not text.full_layers and not text.local_theta and text.window >= longest:
        text = dataclasses.replace(text, window=0)  # no request is long enough for it to matter
    apart = model.vision is not None and config.mm_encoder_tp_mode == "data" and config.tensor_parallel_size > 1
    return dataclasses.replace(model, text=text, pooling=pooling_of(config, model), encoder_data_parallel=apart)


def _early_overrides(config: EngineConfig, path: Path) -> JsonObject:
    """Returns the overrides to apply while config.json is read.

    If they name an architecture with a class head for a checkpoint with an output head, the model is converted
    (``_requested_runner``) and keeps its architecture, because the class head's weights are rows of the output head.
    """
    over = dict(config.hf_overrides)
    if _named_kind(over) == CLASS_HEAD and _named_kind(read_json(path / "config.json") or {}) == GENERATE:
        del over["architectures"]
    return over


def _named_kind(values: JsonMapping) -> str:
    """Returns the kind of head of the architecture that ``values`` names; "": none or an unknown one."""
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in model_registry.architectures():
        return ""
    return model_registry.family_of(name).architectures[name]


def pooling_of(config: EngineConfig, model: ModelConfig) -> Pooling | None:
    """Returns how this configuration pools; None: it generates.

    Raises:
        StartupError: flags contradict each other or the checkpoint.
    """
    runner, convert = _requested_runner(config)
    family = model_registry.family_of(model.architecture)
    kind = family.architectures[model.architecture]
    classifier, generates = kind == CLASS_HEAD, kind == GENERATE
    stored = _read_stored_pooling(model.path) if runner != "generate" else None
    if runner == "auto":
        runner = (
            "pooling" if convert in (EMBED, CLASSIFY, REWARD) or not generates or stored is not None else "generate"
        )
    if runner == "generate":
        if not generates:
            raise StartupError(f"{model.name} holds {model.architecture}, which has no output head; --runner pooling")
        for flag, given in (("--pooler-config", config.pooler_config), *_pooling_overrides(config)):
            if given:
                raise StartupError(f"{flag} is for pooling; add --runner pooling")
        return None
    if family.pooling is None:
        raise StartupError(f"{model.name} holds {model.architecture}, and {family.name} does not pool")
    task = convert if convert in (EMBED, CLASSIFY) else CLASSIFY if classifier else EMBED
    if convert == "none" and generates:
        raise StartupError(f"--convert none: {model.architecture} pools nothing by itself; --convert embed or classify")
    made = _embedding(config, model, stored) if task == EMBED else _classes(config, model, classifier)
    if convert == REWARD and made.kind != ALL:
        made = dataclasses.replace(made, kind=ALL, normalize=False, activation=IDENTITY)
    made, longest = _apply_pooler_config(made, config.pooler_config), config.max_model_len or model.text.max_positions
    if made.longest > longest and not made.chunked:
        raise StartupError(
            f"--pooler-config: max_embed_len {made.longest} is above the model's length of {longest}; "
            "enable_chunked_processing embeds longer texts"
        )
    return made


def _pooling_overrides(config: EngineConfig) -> list[tuple[str, Json]]:
    return [(f"--hf-overrides {key}", True) for key in POOLING_KEYS if key in config.hf_overrides]


def _requested_runner(config: EngineConfig) -> tuple[str, str]:
    """Returns (runner, conversion) from the flags; ``--task`` is their older form."""
    runner, convert, task = config.runner, config.convert, config.task
    if task != "auto":
        older = ("generate", "auto") if task == "generate" else ("pooling", task)
        for name, value, said in (("runner", runner, older[0]), ("convert", convert, older[1])):
            if value not in ("auto", said):
                raise StartupError(f"--task {task} contradicts --{name} {value}; leave --task out")
        runner, convert = older
    if runner == "generate" and convert in (EMBED, CLASSIFY, REWARD):
        raise StartupError(f"--convert {convert} contradicts --runner generate; --runner pooling")
    if _named_kind(config.hf_overrides) == CLASS_HEAD and convert == "auto":
        convert = CLASSIFY
    return runner, convert


# Settings from the checkpoint


def _read_stored_pooling(path: Path) -> StoredPooling | None:
    """Reads the pooling from the files of sentence-transformers; None: there are none.

    Raises:
        StartupError: a module or a mode is not implemented.
    """
    modules = _modules(path)
    if modules is None:
        return None
    kind, normalize = "", False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _mode(path / str(module.get("path", "")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif not name.endswith("Transformer"):  # also custom classes; their prompts come from the chat template
            raise StartupError(f"{path / 'modules.json'} has the module {name}; implemented: Pooling and Normalize")
    return StoredPooling(kind, normalize) if kind else None


def _modules(path: Path) -> list[JsonObject] | None:
    try:
        listed = json.loads((path / "modules.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise StartupError(f"{path / 'modules.json'} is no list of modules of sentence-transformers")
    return listed


def _mode(file: Path) -> str:
    values = read_json(file)
    if values is None:
        raise StartupError(f"modules.json names {file}, which does not exist")
    named = values.get("pooling_mode")
    on = (
        [named]
        if isinstance(named, str)
        else [k for k, v in values.items() if k.startswith("pooling_mode_") and v is True]
    )
    if len(on) != 1 or on[0] not in MODES:
        raise StartupError(
            f"{file} pools by {', '.join(on)[:80] or 'nothing'}; implemented: lasttoken, mean_tokens, cls_token"
        )
    return MODES[on[0]]


def _embedding(config: EngineConfig, model: ModelConfig, stored: StoredPooling | None) -> Pooling:
    raw = {**(read_json(model.path / "config.json") or {}), **config.hf_overrides}
    cut = raw.get("matryoshka_dimensions")
    dimensions = tuple(cut) if isinstance(cut, list) else () if raw.get("is_matryoshka") is True else None
    if dimensions and not all(isinstance(d, int) and 0 < d <= model.text.width for d in dimensions):
        raise StartupError(
            f"{model.path / 'config.json'}: matryoshka_dimensions is {format_value(cut)}; give sizes up to "
            f"{model.text.width}"
        )
    kind, normalize = stored or (model_registry.family_of(model.architecture).pooling or "", True)
    return Pooling(EMBED, kind, normalize, dimensions=dimensions)


def _classes(config: EngineConfig, model: ModelConfig, classifier: bool) -> Pooling:
    raw = {**(read_json(model.path / "config.json") or {}), **config.hf_overrides}
    words = raw.get("classifier_from_token")
    if not classifier or words is not None:
        return _label_tokens(config, model, words)
    names = raw.get("id2label")
    labels = tuple(str(names[k]) for k in sorted(names, key=_number)) if isinstance(names, dict) else ()
    head = model_registry.family_of(model.architecture).heads.get(model.architecture, ClassHead())
    count = head.classes or raw.get("num_labels", len(labels) or 2)
    if not isinstance(count, int) or not 0 < count <= MOST_CLASSES:
        raise StartupError(
            f"{model.path / 'config.json'}: num_labels is {format_value(count)}; give 1 to {MOST_CLASSES}"
        )
    labels = labels if len(labels) == count else tuple(f"LABEL_{i}" for i in range(count))
    return Pooling(
        CLASSIFY, head.kind, classes=count, inner=head.inner, biased=head.biased, labels=labels,
        activation=head.activation or _activation(raw, count), step_tag=head.step_tag,
    )  # fmt: skip


def _label_tokens(config: EngineConfig, model: ModelConfig, words: Json) -> Pooling:
    if words is not None and not (isinstance(words, list) and words and all(isinstance(w, str) and w for w in words)):
        raise StartupError(f'classifier_from_token is {format_value(words)}; give words such as ["no", "yes"]')
    labels, ids = label_tokens(Path(config.tokenizer or model.path), WORDS if words is None else [words])
    if max(ids) >= model.text.vocab:
        raise StartupError(f"{model.name}: a label token lies beyond the vocabulary of {model.text.vocab}")
    activation = SOFTMAX if len(ids) > 1 else SIGMOID
    return Pooling(CLASSIFY, LAST, classes=len(ids), label_tokens=ids, activation=activation, labels=labels)


def _activation(raw: JsonMapping, classes: int) -> str:
    """Returns the activation: sentence-transformers' function, else by ``problem_type``, else by the number of
    classes.
    """
    nested = raw.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else raw.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        function = named.rpartition(".")[2].lower()
        if function not in (SOFTMAX, SIGMOID, IDENTITY):
            raise StartupError(
                f"config.json: the activation {named[:80]!r} is not implemented; Sigmoid, Softmax, Identity"
            )
        return function
    asked = raw.get("problem_type")
    return PROBLEMS[asked] if isinstance(asked, str) and asked in PROBLEMS else SIGMOID if classes < 2 else SOFTMAX


def _number(key: Json) -> int:
    return int(key) if str(key).lstrip("-").isdigit() else 0


# Settings from the flags


def _apply_pooler_config(made: Pooling, asked: JsonMapping) -> Pooling:
    """``made`` with the values of ``--pooler-config``."""
    given = {name: value for name, value in asked.items() if value is not None}
    for one, other in CONTRADICTIONS:
        if one in given and other in given:
            raise StartupError(f"--pooler-config: {one} and {other} say the same; give one of them")
    changed: JsonObject = {}
    for name, value in given.items():
        changed |= _read_pooler_key(made, name, value)
    made = dataclasses.replace(made, **changed)
    if made.kind == MEAN and (made.inner or made.biased):
        raise StartupError("--pooler-config: pooling_type MEAN needs a head of one linear without biases")
    step = next((n for n in ("pooling_type", "tok_pooling_type") if str(given.get(n)).upper() == "STEP"), None)
    if step is not None and made.step_tag < 0:
        raise StartupError(f"--pooler-config: {step} STEP needs step_tag_id, the token that ends a step")
    return made


def _read_pooler_key(made: Pooling, name: str, value: Json) -> JsonObject:
    """Applies one key of ``--pooler-config`` to ``made``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(value, int) and not isinstance(value, bool)
    match name:
        case "task":
            return _read_task(made, value)
        case "pooling_type":
            kind = _one(name, str(value).upper(), KINDS)
            return {"kind": kind} | ({"step_tag": -1} if str(value).upper() == "ALL" else {})
        case "seq_pooling_type":
            return {"kind": _one(name, str(value).upper(), SEQUENCE_KINDS)}
        case "tok_pooling_type":
            _one(name, str(value).upper(), {"ALL": ALL, "STEP": ALL})
            return {"step_tag": -1} if str(value).upper() == "ALL" else {}
        case "step_tag_id" if whole and value >= 0:
            return {"step_tag": value}
        case "normalize" | "use_activation" | "activation" | "softmax":
            return _convert_flag(made.task, name, value)
        case "logit_bias" | "logit_mean" if number and made.task == CLASSIFY:
            return {"bias": float(value)}
        case "logit_sigma" | "logit_scale" if number and value and made.task == CLASSIFY:
            return {"sigma": float(value) if name == "logit_sigma" else 1 / value}
        case "dimensions":
            return {"default_dimensions": _size(made, value)}
        case "enable_chunked_processing" if isinstance(value, bool) and (made.task == EMBED or not value):
            return {"chunked": value}
        case "max_embed_len" if whole and value > 0 and made.task == EMBED:
            return {"longest": value}
        case "returned_token_ids":
            raise StartupError(
                "--pooler-config: returned_token_ids is not implemented; the tokens whose scores count are named by "
                "--hf-overrides classifier_from_token"
            )
    raise StartupError(f"--pooler-config: {name[:40]!r} is {format_value(value)}; known: {POOLER_KEYS}")


def _read_task(made: Pooling, value: Json) -> JsonObject:
    """The change for ``task``: a token task becomes what requests get that name none."""
    if value == made.task:
        return {}
    if value == TOKEN_TASKS[made.task]:
        return {"kind": ALL}
    known = f"{made.task} and {TOKEN_TASKS[made.task]}"
    raise StartupError(
        f"--pooler-config: task is {format_value(value)}; this server does {known} (--convert embed or classify)"
    )


def _convert_flag(task: str, name: str, value: Json) -> JsonObject:
    if not isinstance(value, bool):
        raise StartupError(f"--pooler-config: {name} is {format_value(value)}; give true or false")
    if task == EMBED:
        return {"normalize": value}
    return {} if value else {"activation": IDENTITY}


def _size(made: Pooling, value: Json) -> int:
    if made.dimensions is None:
        raise StartupError("--pooler-config: dimensions needs a Matryoshka checkpoint (is_matryoshka in config.json)")
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < 1
        or (made.dimensions and value not in made.dimensions)
    ):
        raise StartupError(
            f"--pooler-config: dimensions is {format_value(value)}; the checkpoint has {made.dimensions or 'any'}"
        )
    return value


def _one(name: str, value: str, known: Mapping[str, str]) -> str:
    if value not in known:
        raise StartupError(f"--pooler-config: {name} is {value[:40]!r}; implemented: {', '.join(known)}")
    return known[value]


def requested_kv_format(config: EngineConfig, model: ModelConfig) -> KVFormat | None:
    """Returns the format of keys and values in the KV cache; None: the engine's dtype.

    Raises:
        StartupError: the checkpoint's scales are requested, but the cache is not 8-bit or the scales are made for other
            codes.
    """
    static = config.kv_cache_scales == "checkpoint"
    form = parse_kv_format(config.kv_cache_dtype, model.text.head_dim, model.text.qkv_bias, static)
    if not static:
        return form
    flag = "--kv-cache-scales checkpoint"
    if form is None:
        raise StartupError(f"{flag} is for an 8-bit KV cache: add --kv-cache-dtype fp8 or int8")
    made_for = _codes(model)
    if form.name != made_for:
        raise StartupError(f"{flag}: {model.name} has scales for {made_for}; --kv-cache-dtype {made_for} fits")
    return form


def _codes(model: ModelConfig) -> str:
    """Returns the codes that a checkpoint's KV scales are made for; fp8 if config.json does not say."""
    raw = read_json(model.path / "config.json") or {}
    for place in (raw, raw.get("text_config")):
        quant = place.get("quantization_config") if isinstance(place, dict) else None
        scheme = quant.get("kv_cache_scheme") if isinstance(quant, dict) else None
        if isinstance(scheme, dict):
            return INT8 if scheme.get("type") == "int" else FP8
    return FP8
