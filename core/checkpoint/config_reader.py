"""Reads a checkpoint's config.json, in the hub's layout or that of transformers 5. Torch-free.

Every key that can change a result is used, checked against the implemented values, or refused; unknown keys are
collected for one warning line. A missing key has transformers' default.
"""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from trencadis.core import envs
from trencadis.core.checkpoint.family import Family
from trencadis.core.checkpoint.inc_config import VARIABLE, given_scales
from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import OTHER_LAYOUTS, architectures, family_of
from trencadis.core.checkpoint.quant_config import ONLINE, Quantisation, from_inc, online, read_quantisation
from trencadis.core.errors import StartupError, suggest_name
from trencadis.core.json_types import JsonMapping, JsonObject

DTYPES = ("bfloat16", "float16", "float32", "float64")
NEUTRAL = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "classifier_from_token",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "ignore_keys_at_rope_validation",
        "image_token_id",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_matryoshka",
        "is_original_qwen3_reranker",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "matryoshka_dimensions",
        "max_length",
        "max_window_layers",
        "method",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "quantization_config",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "sep_token_id",
        "sliding_window",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "text_config",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "transformers.js_config",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_mrope",
        "use_return_dict",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    ]
)
"""Keys that change no result of any family, or that are read elsewhere (generation, pooling, tokenizer)."""


def check_regular_files(folder: Path) -> None:
    """Raises StartupError if a file of a checkpoint is a FIFO, a socket or a device, which a reader might wait for."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link that leads nowhere
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise StartupError(f"{entry} is not a regular file")


GGUF, GGUF_HINT = "a GGUF file", "take the safetensors checkpoint that it was made of"


def load_config(path: Path, quantization: str = "", overrides: JsonMapping | None = None) -> ModelConfig:
    """Reads ``path``/config.json (and generation_config.json for the EOS ids).

    Args:
        quantization: ``--quantization``: how to quantise a 16-bit checkpoint, or the format that the checkpoint must
            have.
        overrides: ``--hf-overrides``: nested values that replace those of the file.

    Raises:
        StartupError: the file is unreadable, the architecture is not supported, the checkpoint is quantised in another
            way than requested or in one that is not implemented, or a value is not implemented. The message says what
            the checkpoint holds and what is supported.
    """
    check_regular_files(path)
    raw = read_json(path / "config.json")
    if raw is None:
        raise StartupError(
            f"{path} holds {_describe_contents(path)}; supported: safetensors checkpoints of {_list_architectures()}"
        )
    if overrides:
        raw = merge_values(raw, overrides)
    root = JsonFields(raw, path / "config.json")
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "none"
    if architecture in OTHER_LAYOUTS:
        raise StartupError(f"{path} holds {architecture} (architectures): {OTHER_LAYOUTS[architecture]}")
    if architecture not in architectures():
        like = suggest_name(architecture, architectures())
        hint = f"; the nearest is {like}" if like else ""
        raise StartupError(
            f"{path} holds {architecture[:80]} (architectures); supported: {_list_architectures()}{hint}"
        )
    family = family_of(architecture)
    # transformers reads only text_config if there is one; the hub's files are flat.
    nested = family.vision is not None and root.is_given("text_config")
    text = root.within("text_config") if nested else root
    places = (root, text) if nested else (root,)
    quant = next((read_quantisation(p) for p in places if p.values.get("quantization_config")), None)
    if root.is_given("model_type") and root.values["model_type"] != family.model_type:
        root.refuse("model_type", f"it must be {family.model_type}, as architectures names {architecture}")
    return _build_config(path, architecture, family, root, text, _choose_quantisation(path, quant, quantization))


def merge_values(held: JsonMapping, over: JsonMapping) -> JsonObject:
    """Returns ``held`` updated with ``over``; objects are merged key by key, anything else is replaced."""
    out = dict(held)
    for key, value in over.items():
        before = out.get(key)
        out[key] = merge_values(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return out


def _describe_contents(path: Path) -> str:
    """Describes, for an error message, what a folder without config.json holds."""
    for pattern, kind, instead in (
        ("*.gguf", GGUF, GGUF_HINT),
        ("params.json", "a checkpoint of another format", "take the repository's files in transformers' format"),
    ):
        found = next(path.glob(pattern), None) if path.is_dir() else None
        if found is not None:
            return f"{kind} ({found.name}): {instead}"
    return "no config.json"


TASKS = ("ForConditionalGeneration", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model", "")


def _list_architectures() -> str:
    """Returns all names, as {Llama, Mistral}ForCausalLM: written in full they would fill a screen."""
    grouped: dict[str, list[str]] = {task: [] for task in TASKS}
    for name in architectures():
        task = next(task for task in TASKS if name.endswith(task))
        grouped[task].append(name.removesuffix(task))
    several = {task: names for task, names in grouped.items() if names}
    return ", ".join(f"{{{', '.join(names)}}}{task}" if task else ", ".join(names) for task, names in several.items())


def _build_config(
    path: Path, architecture: str, family: Family, root: JsonFields, text: JsonFields, quant: Quantisation | None
) -> ModelConfig:
    made = family.config(root, text, _read_tied(root, text, family.tied))
    media = made.media
    if quant is not None:
        quant = replace(quant, prefixes=tuple(family.names.prefixes.items()), inner=family.names.inner)
    return ModelConfig(
        path=path,
        architecture=architecture,
        text=made.text,
        vision=made.vision,
        dtype=_dtype(root, text),
        eos=_eos(path, root, text, made.text.vocab),
        image_token=media.get("image_token_id", -1),
        template_token=media.get("placed_token_id", -1),
        video_token=media.get("video_token_id", -1),
        vision_start=media.get("vision_start_token_id", -1),
        vision_end=media.get("vision_end_token_id", -1),
        quant=quant,
        unread=tuple(sorted({*root.unread(), *text.unread()} - NEUTRAL - family.ignored)),
    )


def _choose_quantisation(path: Path, held: Quantisation | None, asked: str) -> Quantisation | None:
    """Returns how the weights are quantised: as stored in the checkpoint, or while they load; None: not at all."""
    inc = envs.get(VARIABLE) or ""
    if asked == "inc" and held is None:
        return from_inc(given_scales(inc))
    if inc and asked != "inc":
        raise StartupError(f"{VARIABLE} is set and --quantization inc, which uses it, is not; add the flag or unset it")
    if not asked or (held is not None and held.label == asked):
        return held
    if held is not None:
        raise StartupError(f"--quantization {asked}: {path} holds {held.label} weights; leave the flag out")
    if asked in ONLINE:
        return online(asked)
    raise StartupError(
        f"--quantization {asked}: {path} holds 16- or 32-bit weights, no {asked} ones; "
        f"--quantization {', '.join(ONLINE[:-1])} or {ONLINE[-1]} quantises them as they load"
    )


def _read_tied(root: JsonFields, text: JsonFields, default: bool) -> bool:
    """Returns True if either place sets ``tie_word_embeddings``: older files have the key in text_config."""
    places = (root, text) if text is not root else (root,)
    said = [place.boolean("tie_word_embeddings") for place in places if "tie_word_embeddings" in place.values]
    return any(said) if said else default


def _dtype(root: JsonFields, text: JsonFields) -> str:
    for place, key in ((root, "dtype"), (root, "torch_dtype"), (text, "dtype"), (text, "torch_dtype")):
        if place.is_given(key):
            place.only(key, (*DTYPES, *(f"torch.{name}" for name in DTYPES)))
            return str(place.values[key]).removeprefix("torch.")
    return "float32"


def _eos(path: Path, root: JsonFields, text: JsonFields, vocab: int) -> tuple[int, ...]:
    """Returns the EOS ids from the first file that names any: generation_config.json, text_config, config.json."""
    where = path / "generation_config.json"
    for place in (JsonFields(read_json(where) or {}, where), text, root):
        if place.is_given("eos_token_id"):
            if isinstance(place.values["eos_token_id"], list):
                return place.integers("eos_token_id", 0, vocab - 1)
            return (place.integer("eos_token_id", 0, vocab - 1),)
    return ()
