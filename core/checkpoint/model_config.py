"""A checkpoint's config.json as frozen values, in the hub's layout or that of transformers 5. Torch-free.

Every key that can change a result is used, or must have a value that is implemented, or is refused; other keys are
ignored. A missing key has transformers' default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trencadis.core import envs
from trencadis.core.checkpoint.fields import Fields, read_json
from trencadis.core.checkpoint.inc_config import VARIABLE, given_scales
from trencadis.core.checkpoint.pooling import Pooling
from trencadis.core.checkpoint.quant_config import ONLINE, Quantisation, from_inc, online, read_quantisation
from trencadis.core.checkpoint.rope_config import LARGEST_BASE, LinearScaling, RopeScaling, rope_of
from trencadis.core.errors import StartupError
from trencadis.core.layout import CHANNELS, FACTOR, MERGE, PATCH, TEMPORAL, WINDOW_CELLS
from trencadis.core.quant.kv import KVForm

VISION_MODEL = "Qwen2_5_VLForConditionalGeneration"
LLAMA = "LlamaForCausalLM"
TEXT_MODELS = ("Qwen2ForCausalLM", LLAMA)
CLASSIFIERS = ("Qwen2ForSequenceClassification", "LlamaForSequenceClassification")
"""Decoders with a class head (``score``) in place of the output head."""

BARE_MODELS = ("Qwen2Model", "LlamaModel")
"""Decoders alone, for embeddings."""

ARCHITECTURES = (VISION_MODEL, *TEXT_MODELS, *CLASSIFIERS, *BARE_MODELS)
MODEL_TYPES = {VISION_MODEL: "qwen2_5_vl"} | {
    name: "llama" if name.startswith("Llama") else "qwen2" for name in (*TEXT_MODELS, *CLASSIFIERS, *BARE_MODELS)
}
"""``model_type`` must match: transformers builds the model that it names, whatever ``architectures`` says."""

ACTIVATIONS = ("silu", "swish")
DTYPES = ("bfloat16", "float16", "float32", "float64")
MOST_LAYERS = 1024
WIDEST = 2**22
"""Largest hidden size, intermediate size and vocabulary."""

MOST_HEADS = 2**14
MEDIA_TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


@dataclass(frozen=True)
class TextConfig:
    """The decoder; ``kv``: how its KV cache holds keys and values (None: in the engine's type)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    mrope_section: tuple[int, int, int] | None = None
    rope_scaling: LinearScaling | RopeScaling | None = None
    out_bias: bool = False
    mlp_bias: bool = False
    kv: KVForm | None = None


@dataclass(frozen=True)
class VisionConfig:
    """The Qwen2.5-VL tower."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    full_layers: tuple[int, ...]
    patch: int = PATCH
    merge: int = MERGE
    temporal: int = TEMPORAL
    channels: int = CHANNELS
    tokens_per_second: float = 2.0
    rope_theta: float = 10000.0

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels x temporal x patch x patch."""
        return self.channels * self.temporal * self.patch * self.patch


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs of a checkpoint.

    ``dtype``: of its 16- or 32-bit weights, ``quant``: of others; ``pooling`` None: it generates.
    """

    path: Path
    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    dtype: str
    eos: tuple[int, ...]
    image_token: int = -1
    video_token: int = -1
    vision_start: int = -1
    vision_end: int = -1
    quant: Quantisation | None = None
    pooling: Pooling | None = None

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.path.name


def load_config(path: Path, quantization: str = "") -> ModelConfig:
    """Reads ``path``/config.json (and generation_config.json for the EOS ids).

    Args:
        quantization: ``--quantization``: what to make of a 16-bit checkpoint, or what the checkpoint must be.

    Raises:
        StartupError: the file is unreadable, the architecture is not supported, the checkpoint is quantised in another
            way than asked or in one that is not implemented, or a value is not implemented; the line says what the
            checkpoint holds and what is supported.
    """
    raw = read_json(path / "config.json")
    if raw is None:
        gguf = next(path.glob("*.gguf"), None) if path.is_dir() else None
        held = f"a GGUF file ({gguf.name})" if gguf else "no config.json"
        raise StartupError(f"{path} holds {held}; supported: safetensors checkpoints of {', '.join(ARCHITECTURES)}")
    root = Fields(raw, path / "config.json")
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "none"
    if architecture not in ARCHITECTURES:
        raise StartupError(f"{path} holds {architecture} (architectures); supported: {', '.join(ARCHITECTURES)}")
    # transformers reads only text_config if there is one; the hub's files are flat.
    nested = architecture == VISION_MODEL and root.given("text_config")
    text = root.within("text_config") if nested else root
    places = (root, text) if nested else (root,)
    quant = next((read_quantisation(p) for p in places if p.values.get("quantization_config")), None)
    if root.given("model_type"):
        root.only("model_type", (MODEL_TYPES[architecture],))
    return replace(_parse(path, architecture, root, text), quant=_asked(path, quant, quantization))


def _asked(path: Path, held: Quantisation | None, asked: str) -> Quantisation | None:
    """How the weights are quantised: as the checkpoint has them, or as they are made while they load."""
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


def _parse(path: Path, architecture: str, root: Fields, text: Fields) -> ModelConfig:
    decoder = _text(text, _tied(root, text), architecture)
    vision = None
    media = dict.fromkeys(MEDIA_TOKENS, -1)
    if architecture == VISION_MODEL:
        vision = _vision(root.within("vision_config"), decoder.hidden)
        media = {key: _token(root, key, default, decoder.vocab) for key, default in MEDIA_TOKENS.items()}
        if media["image_token_id"] == media["video_token_id"]:
            root.refuse("image_token_id", "it must differ from video_token_id")
    return ModelConfig(
        path=path,
        architecture=architecture,
        text=decoder,
        vision=vision,
        dtype=_dtype(root, text),
        eos=_eos(path, root, text, decoder.vocab),
        image_token=media["image_token_id"],
        video_token=media["video_token_id"],
        vision_start=media["vision_start_token_id"],
        vision_end=media["vision_end_token_id"],
    )


def _tied(root: Fields, text: Fields) -> bool:
    """Whether either place says so: older files have the key in text_config."""
    said = [place.boolean("tie_word_embeddings", False) for place in (root, text)]
    return any(said)


def _dtype(root: Fields, text: Fields) -> str:
    for place, key in ((root, "dtype"), (root, "torch_dtype"), (text, "dtype"), (text, "torch_dtype")):
        if place.given(key):
            place.only(key, (*DTYPES, *(f"torch.{name}" for name in DTYPES)))
            return str(place.values[key]).removeprefix("torch.")
    return "float32"


def _eos(path: Path, root: Fields, text: Fields, vocab: int) -> tuple[int, ...]:
    """EOS ids of the first place that names any."""
    where = path / "generation_config.json"
    for place in (Fields(read_json(where) or {}, where), text, root):
        if place.given("eos_token_id"):
            if isinstance(place.values["eos_token_id"], list):
                return place.integers("eos_token_id", 0, vocab - 1)
            return (place.integer("eos_token_id", 0, vocab - 1),)
    return ()


def _token(root: Fields, key: str, default: int, vocab: int) -> int:
    """A token's id; -1 if the key is missing and the default lies beyond the vocabulary."""
    if key in root.values:
        return root.integer(key, 0, vocab - 1)
    return default if default < vocab else -1


def _text(c: Fields, tied: bool, architecture: str) -> TextConfig:
    llama = architecture.startswith("Llama")
    c.only("hidden_act", ACTIVATIONS, "silu")
    _full_attention(c)
    hidden, heads, kv_heads, head_dim = _heads(c, architecture)
    max_positions = c.integer("max_position_embeddings", default=2048 if llama else 32768)
    vision = architecture == VISION_MODEL
    rope = rope_of(c, max_positions, head_dim, axes=vision, base=1e6 if vision else 1e4)
    bias = llama and c.boolean("attention_bias", False)
    return TextConfig(
        hidden=hidden,
        layers=c.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=c.integer("intermediate_size", most=WIDEST),
        vocab=c.integer("vocab_size", most=WIDEST),
        eps=c.number("rms_norm_eps", 0, 1, above=True),
        rope_theta=rope.theta,
        max_positions=max_positions,
        tied=tied,
        qkv_bias=bias if llama else True,
        mrope_section=rope.section,
        rope_scaling=rope.scaling,
        out_bias=bias,
        mlp_bias=llama and c.boolean("mlp_bias", False),
    )


def _heads(c: Fields, architecture: str) -> tuple[int, int, int, int]:
    """(hidden size, query heads, KV heads, size of a head)."""
    hidden = c.integer("hidden_size", most=WIDEST)
    heads = c.integer("num_attention_heads", most=MOST_HEADS)
    if hidden % heads:
        c.refuse("num_attention_heads", f"it must divide hidden_size, which is {hidden}")
    kv_heads, llama = heads, architecture.startswith("Llama")
    # Only Llama may leave the key out; a null means one KV head for each query head.
    if c.given("num_key_value_heads") or ("num_key_value_heads" not in c.values and not llama):
        kv_heads = c.integer("num_key_value_heads", most=MOST_HEADS)
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"it must divide num_attention_heads, which is {heads}")
    head_dim = c.integer("head_dim", most=WIDEST) if c.given("head_dim") else hidden // heads
    if head_dim % 2 or (architecture == VISION_MODEL and head_dim * heads != hidden):
        rule = "an even size" if head_dim % 2 else f"{hidden // heads}, hidden_size / num_attention_heads"
        c.refuse("head_dim" if c.given("head_dim") else "num_attention_heads", f"implemented: heads of {rule}")
    return hidden, heads, kv_heads, head_dim


def _full_attention(c: Fields) -> None:
    """Refuses a model whose attention is not full in every layer."""
    if c.given("use_sliding_window") and c.boolean("use_sliding_window"):
        c.refuse("use_sliding_window", "implemented: full attention (false)")
    if c.given("is_causal") and not c.boolean("is_causal"):
        c.refuse("is_causal", "implemented: causal attention (true)")
    types = c.values.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(one != "full_attention" for one in types)):
        c.refuse("layer_types", "implemented: full_attention in every layer")
    if types is not None and len(types) != c.values.get("num_hidden_layers"):
        c.refuse("num_hidden_layers", f"it must be the length of layer_types, which is {len(types)}")


def _vision(c: Fields, text_hidden: int) -> VisionConfig:
    c.only("hidden_act", ACTIVATIONS, "silu")
    # The size of a patch, of a merge cell and of a window are built into packing, buckets and kernels.
    c.only("patch_size", (PATCH,), PATCH)
    c.only("temporal_patch_size", (TEMPORAL,), TEMPORAL)
    c.only("spatial_merge_size", (MERGE,), MERGE)
    c.only("in_channels", (CHANNELS,), CHANNELS)
    window = WINDOW_CELLS * FACTOR
    if c.integer("window_size", default=window) // FACTOR != WINDOW_CELLS:
        c.refuse("window_size", f"implemented: windows of {window} pixels")
    hidden, heads = c.integer("hidden_size", most=WIDEST), c.integer("num_heads", most=MOST_HEADS)
    if hidden % (4 * heads):
        c.refuse("num_heads", f"implemented: heads whose size is a multiple of 4, and hidden_size is {hidden}")
    out_hidden = c.integer("out_hidden_size", most=WIDEST, default=text_hidden)
    if out_hidden != text_hidden:
        c.refuse("out_hidden_size", f"it must be the text model's hidden_size, which is {text_hidden}")
    depth = c.integer("depth", most=MOST_LAYERS)
    # transformers reads these keys as aliases.
    for alias, value in (("num_attention_heads", heads), ("num_hidden_layers", depth), ("head_dim", hidden // heads)):
        if c.given(alias):
            c.only(alias, (value,))
    return VisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST),
        out_hidden=out_hidden,
        full_layers=c.integers("fullatt_block_indexes", -MOST_LAYERS, MOST_LAYERS),
        tokens_per_second=c.number("tokens_per_second", 0, 10000, 4),
        rope_theta=_vision_theta(c),
    )


def _vision_theta(c: Fields) -> float:
    rope = c.within("rope_scaling" if c.values.get("rope_scaling") else "rope_parameters")
    for key in ("rope_type", "type"):
        if key in rope.values:
            rope.only(key, ("axial", "default"))
    place = rope if "rope_theta" in rope.values else c
    return place.number("rope_theta", 0, LARGEST_BASE, 10000.0, above=True)


@dataclass(frozen=True)
class ImageNeeds:
    """What images may need: slots and tokens of the largest, slots of the smallest; all 0 without a tower.

    ``step``: sides are multiples of this many pixels. ``pictures``: (slots of one, fewest, most at a time) of sizes
    that the user named; 0 pictures: as many as a prompt may hold.
    """

    slots: int = 0
    least_slots: int = 0
    tokens: int = 0
    step: int = FACTOR
    pictures: tuple[tuple[int, int, int], ...] = ()
