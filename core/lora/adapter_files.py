"""Reads a PEFT adapter: ``adapter_config.json``, and tensors whose names, shapes and contents are checked.

Torch-free.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.family import RECURRENT, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.checkpoint.model_config import GATED, ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import adapted_tower, family_of
from trencadis.core.checkpoint.quant_config import canonical_name
from trencadis.core.errors import FilesNotFound, StartupError
from trencadis.core.json_types import Json
from trencadis.core.operator_files import expand_path

CONFIG = "adapter_config.json"
MOST_RANK = 4096
MOST_ALPHA = 1e6
LONGEST_PATTERN = 200
MOST_REPEATS = 3
"""Most quantifiers of a pattern, so that matching a module's name takes few steps."""

WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "velora_config",
})  # fmt: skip
"""Keys about training, or about which modules were trained: the names of the tensors say the same."""

KEEP_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights``, beside true and false, with which training leaves the weights of the base alone.

Others (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) change them first, so that the adapter does not fit the original weights.
"""

REFUSED = {
    "use_dora": "DoRA scales the base's weights; merge the adapter with peft",
    "modules_to_save": "whole modules are replaced; merge the adapter with peft",
    "lora_bias": "biases of adapters are not implemented",
    "use_qalora": "QALoRA pools the inputs of a group; it is not implemented",
    "layer_replication": "layers that are used twice are not implemented",
    "trainable_token_indices": "embeddings of an adapter are not implemented; merge it with peft",
    "target_parameters": "adapters of experts are not implemented; merge the adapter with peft",
    "alora_invocation_tokens": "an adapter that starts at some tokens is not implemented",
    "arrow_config": "routed adapters are not implemented",
    "use_bdlora": "block-diagonal adapters are not implemented",
}
"""Keys whose value, unless empty, changes answers in a way that is not implemented -> what it means."""


@dataclass(frozen=True)
class AdapterConfig:
    """The part of an adapter's configuration that determines its weights.

    Args:
        rank, alpha: defaults of all modules.
        ranks, alphas: patterns of module names -> other values; the first match counts.
        root_scale: True if a module's scale is alpha / sqrt(rank) (rsLoRA), not alpha / rank.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root_scale: bool

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, by its name in the trained model."""
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of B times A for a module."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root_scale else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the configuration of the adapter in ``folder``.

    Raises:
        FilesNotFound: it is missing.
        StartupError: it is invalid, or asks for something that is not implemented; one line.
    """
    path = folder / CONFIG
    values = read_json(path)
    if values is None:
        raise FilesNotFound(f"{folder} holds no LoRA adapter: it has no {CONFIG}")
    c = JsonFields(values, path)
    c.only("peft_type", ("LORA",), "LORA")
    c.only("bias", ("none",), "none")
    for key, why in REFUSED.items():
        if values.get(key):
            c.refuse(key, why)
    if values.get("init_lora_weights") not in (None, True, False, *KEEP_BASE):
        c.refuse(
            "init_lora_weights",
            "training changed the base's weights; save it again by peft with path_initial_model_for_weight_conversion",
        )
    rank = c.integer("r", most=MOST_RANK)
    alpha = c.number("lora_alpha", 0, MOST_ALPHA, above=True)
    ranks, alphas = c.within("rank_pattern"), c.within("alpha_pattern")
    made = AdapterConfig(
        rank=rank,
        alpha=alpha,
        ranks={_check(ranks, key): ranks.integer(key, most=MOST_RANK) for key in ranks.values},
        alphas={_check(alphas, key): alphas.number(key, 0, MOST_ALPHA, above=True) for key in alphas.values},
        root_scale=c.boolean("use_rslora", False),
    )
    for key in sorted(c.unread() - WITHOUT_EFFECT - {*REFUSED, "init_lora_weights"}):
        if values[key]:
            c.refuse(key, "this key is not known, and may change answers")
    return made


def _check(c: JsonFields, pattern: str) -> str:
    """Returns ``pattern``; refuses one that is no regular expression, or one that may take long to match."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > LONGEST_PATTERN or repeats > MOST_REPEATS:
        c.refuse(pattern, f"implemented: patterns of {LONGEST_PATTERN} characters with {MOST_REPEATS} repetitions")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        c.refuse(pattern, "its key is no regular expression")
    return pattern


def _matches(pattern: str, module: str) -> bool:
    """Returns True if ``pattern`` matches a module's name, or its part after a dot."""
    return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module) is not None


WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
MAX_HEADER = 16 << 20
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of an adapter's tensors -> bytes of a value."""

EXPONENT = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}
"""Types -> unsigned integers of the same size, and the exponent of values that are not finite."""

PEFT_PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")
BLOCK = re.compile(r"visual\.blocks\.(\d{1,6})\.(.+)")
TOWER = "visual."
"""Prefix of the canonical names of a vision tower and of the layers after it."""


class AdapterTensor(NamedTuple):
    """A stored tensor: [rows, columns], and the position of its bytes in the file."""

    kind: str
    rows: int
    columns: int
    begin: int
    end: int


@dataclass(frozen=True)
class AdapterModule:
    """The adapter of one matrix [out, in]: A [rank, in] and B [out, rank], whose product is multiplied by ``scale``."""

    a: AdapterTensor
    b: AdapterTensor
    scale: float

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return self.a.rows


@dataclass(frozen=True)
class Adapter:
    """An adapter whose names and shapes fit a model.

    Args:
        modules: canonical name of a matrix (``core.checkpoint.family.StoredNames``) -> its adapter; a fused matrix has
            one if the checkpoint's model has it fused.
        digest: SHA-256 of the weights and of everything that determines how they are used.
    """

    folder: Path
    modules: Mapping[str, AdapterModule]
    digest: str

    @property
    def rank(self) -> int:
        """Largest rank."""
        return max(module.rank for module in self.modules.values())

    @property
    def in_tower(self) -> bool:
        """True if the outputs of the vision tower change."""
        return any(name.startswith(TOWER) for name in self.modules)


def read_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Reads names, shapes and contents of the adapter in ``folder``.

    Raises:
        StartupError: a file is missing, cut short or invalid, a value is not finite, or a tensor does not fit the
            model; one line.
    """
    settings = read_adapter_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / PICKLED).exists()
        raise StartupError(f"{folder} has no {WEIGHTS}" + (f"; {PICKLED} is not read: convert it" if pickled else ""))
    try:
        data = np.memmap(path, np.uint8, mode="c") if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    tensors = {name: tensor for name, tensor in _read_header(path, data)}
    modules = _pair(path, tensors, settings, config)
    for name, tensor in tensors.items():
        if not _is_finite(data, tensor):
            raise StartupError(f"{path} holds values that are not finite: {name[:120]}")
    return Adapter(folder, modules, _digest(data, modules))


def read_matrix(data: np.memmap | np.ndarray, tensor: AdapterTensor) -> np.ndarray:
    """Returns a tensor of the file's bytes ``data`` as unsigned integers or floats [rows, columns]; bfloat16 as
    uint16.
    """
    kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.kind]
    raw = np.ascontiguousarray(data[tensor.begin : tensor.end])
    return raw.view(kind).reshape(tensor.rows, tensor.columns)


def _read_header(path: Path, data: np.ndarray) -> Iterator[tuple[str, AdapterTensor]]:
    """Yields the tensors of a safetensors file; raises StartupError if it is invalid or cut short."""
    size = data.size
    length = int.from_bytes(data[:8].tobytes(), "little")
    try:
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError("no header")
        header: Json = json.loads(data[8 : 8 + length].tobytes())
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        found = [(name, _place(entry, 8 + length)) for name, entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StartupError(f"{path} is not a readable safetensors file ({str(error)[:100]})") from None
    for name, tensor in found:
        if tensor.end > size:
            raise StartupError(f"{path} is cut short: {name[:120]} reaches beyond its end")
        yield name, tensor


def _place(entry: Json, base: int) -> AdapterTensor:
    kind, shape, (begin, end) = str(entry["dtype"]), [int(d) for d in entry["shape"]], entry["data_offsets"]
    if kind not in ITEM_BYTES:
        raise ValueError(f"a tensor has type {kind[:20]}; implemented: {', '.join(ITEM_BYTES)}")
    if len(shape) != 2:
        raise ValueError(f"a tensor has shape {shape[:8]}, and those of an adapter are matrices")
    if min(begin, *shape) < 0 or end - begin != prod(shape) * ITEM_BYTES[kind] or not prod(shape):
        raise ValueError("a tensor does not fill its shape")
    return AdapterTensor(kind, shape[0], shape[1], base + begin, base + end)


def _pair(
    path: Path, tensors: Mapping[str, AdapterTensor], settings: AdapterConfig, config: ModelConfig
) -> dict[str, AdapterModule]:
    """Joins A and B of each module under its canonical name."""
    names = family_of(config.architecture).names
    sides: dict[str, dict[str, AdapterTensor]] = {}
    trained: dict[str, str] = {}
    for stored, tensor in tensors.items():
        match = TENSOR.fullmatch(stored.removeprefix(PEFT_PREFIX))
        if match is None:
            raise StartupError(f"{path}: {stored[:120]} {_name_problem(stored)}")
        module = match["module"]
        name = find_module(module, names)
        if name is None or trained.setdefault(name, module) != module:
            raise StartupError(f"{path}: {config.name} has no matrix of its own for {stored[:120]}")
        sides.setdefault(name, {})[match["side"]] = tensor
    if not sides:
        raise StartupError(f"{path} holds no tensors")
    return {name: _join(path, name, trained[name], both, settings, config) for name, both in sorted(sides.items())}


def _name_problem(stored: str) -> str:
    """Says why a tensor that is neither A nor B of a matrix cannot be applied."""
    for part, what in (
        ("lora_embedding_", "is an adapter of an embedding, which is not implemented"),
        ("lora_magnitude_vector", "belongs to DoRA, which is not implemented"),
        ("modules_to_save", "replaces a whole module, which is not implemented"),
        (".bias", "is a bias, which is not implemented"),
        ("lora_", "is not implemented"),
    ):
        if part in stored:
            return what
    return "is no tensor of a LoRA adapter"


def find_module(module: str, names: StoredNames) -> str | None:
    """Returns the canonical name of a matrix by its name in the trained model; None: it has none."""
    found = canonical_name(f"{module}.weight", names.prefixes.items(), names.inner)
    return None if found is None else found.removesuffix(".weight")


def _join(
    path: Path, name: str, trained: str, both: Mapping[str, AdapterTensor], settings: AdapterConfig, config: ModelConfig
) -> AdapterModule:
    """Returns the adapter of one matrix; raises StartupError if it does not fit the matrix."""
    if len(both) < 2:
        raise StartupError(f"{path}: {trained[:120]} has only one of lora_A and lora_B")
    a, b = both["A"], both["B"]
    rank = settings.rank_of(trained)
    if a.rows != rank or b.columns != rank:
        raise StartupError(
            f"{path}: {trained[:120]} has rank {a.rows} and {b.columns}, adapter_config.json says {rank}"
        )
    if not name.startswith(TOWER):
        shape = matrix_shape(config, name)
        if shape is None:
            if (layer := LAYER.fullmatch(name)) is not None and int(layer[1]) >= config.text.layers:
                raise StartupError(f"{path} is for another model: {config.name} has no {trained[:120]}")
            raise StartupError(f"{path}: adapters of {trained[:120]} are not implemented")
        if (b.rows, a.columns) != shape:
            raise StartupError(
                f"{path} is for another model: {trained[:120]} is [{b.rows}, {a.columns}], {config.name} has "
                f"{list(shape)}"
            )
    return AdapterModule(a, b, settings.scale_of(trained))


def matrix_shape(config: ModelConfig, name: str) -> tuple[int, int] | None:
    """Returns (out, in) of a decoder's matrix by its canonical name; None: there is none that takes an adapter."""
    match, c = LAYER.fullmatch(name), config.text
    if match is None or int(match[1]) >= c.layers:
        return None
    index = int(match[1])
    c = c.of_layer(index)
    if index in c.cross_attention_layers:
        return None
    shapes = dict[str, tuple[int, int]]()
    if c.recurrent is not None and index in c.recurrent.layers:
        if RECURRENT in family_of(config.architecture).adapters:
            shapes = {f"linear_attn.{part}": shape for part, shape in _recurrent_shapes(c, c.recurrent).items()}
    elif c.mixes_tokens(index):
        shapes = {f"self_attn.{part}": shape for part, shape in _attention_shapes(c).items()}
    inner = c.intermediate
    if c.has_mlp(index):
        shapes |= {"mlp.up_proj": (inner, c.hidden), "mlp.down_proj": (c.hidden, inner)}
        if c.mlp == GATED:
            shapes |= {"mlp.gate_proj": (inner, c.hidden), "mlp.gate_up_proj": (2 * inner, c.hidden)}
    return shapes.get(match[2])


def _attention_shapes(c: TextConfig) -> dict[str, tuple[int, int]]:
    q, kv, values = c.heads * c.query_width, c.kv_heads * c.head_dim, c.heads * c.head_dim
    shapes = {
        "q_proj": (q, c.hidden), "k_proj": (kv, c.hidden), "v_proj": (kv, c.hidden),
        "qkv_proj": (q + 2 * kv, c.hidden), "o_proj": (c.hidden, values),
    }  # fmt: skip
    for part in ("v_proj", "qkv_proj", "k_proj")[: 3 - c.key_parts if c.key_parts < 2 else 0]:
        del shapes[part]
    return shapes


def _recurrent_shapes(c: TextConfig, r: RecurrentConfig) -> dict[str, tuple[int, int]]:
    if r.width:
        return {"in_proj": (3 * r.width, c.hidden), "out_proj": (c.hidden, r.width)}
    ends = {"out_proj": (c.hidden, r.value_width)}
    if r.scan:
        return {"in_proj": (r.channels() + r.value_width + r.value_heads, c.hidden), **ends}
    beside = {f"in_proj_{name}": (r.value_heads, c.hidden) for name in "ba"}
    return {"in_proj_qkv": (r.channels(), c.hidden), "in_proj_z": (r.value_width, c.hidden), **beside, **ends}


def check_tower(adapter: Adapter, config: ModelConfig) -> None:
    """Checks that matrices of the vision tower can have their adapters beside the model.

    Those of layers whose outputs nothing reads are ignored, as the layers are.

    Raises:
        StartupError: one of them is merged only, or has another shape; one line.
    """
    shapes = {one.name: (one.rows, one.columns) for one in adapted_tower(config)} if adapter.in_tower else {}
    for name, module in adapter.modules.items():
        if not name.startswith(TOWER):
            continue
        if name not in shapes and (match := BLOCK.fullmatch(name)) is not None and config.vision is not None:
            shift = config.vision.unused_layers if int(match[1]) >= config.vision.depth else 0
            name = f"visual.blocks.{int(match[1]) - shift}.{match[2]}"
        if name not in shapes:
            raise StartupError(
                f"{adapter.folder}: adapters of {name[:120]} are not kept beside {config.name}; trencadis merge-lora "
                "merges them"
            )
        if (module.b.rows, module.a.columns) != shapes[name]:
            raise StartupError(
                f"{adapter.folder} is for another model: {name[:120]} is [{module.b.rows}, {module.a.columns}], "
                f"{config.name} has {list(shapes[name])}"
            )


def _is_finite(data: np.ndarray, tensor: AdapterTensor) -> bool:
    kind, exponent = EXPONENT[tensor.kind]
    bits = np.ascontiguousarray(data[tensor.begin : tensor.end]).view(kind)
    return not bool(((bits & kind(exponent)) == exponent).any())


def _digest(data: np.ndarray, modules: Mapping[str, AdapterModule]) -> str:
    """Returns the digest of values and scales of all modules."""
    found = sha256(b"trencadis-lora-1")
    for name, module in modules.items():
        for tensor in (module.a, module.b):
            found.update(f"{name}\0{tensor.kind}\0{tensor.rows}\0{tensor.columns}\0{module.scale!r}\0".encode())
            found.update(data[tensor.begin : tensor.end].data)
    return found.hexdigest()


def resolve_folder(path: str, allowed: Path | None = None) -> Path:
    """Returns the folder of an adapter.

    Raises:
        FilesNotFound: there is no such folder.
        StartupError: it is not inside ``allowed``, or a file in it is a link out of it.
    """
    folder = Path(os.path.realpath(expand_path(path)))
    if allowed is not None and not folder.is_relative_to(os.path.realpath(allowed)):
        raise StartupError(f"{path[:120]} is not inside the folder of --allowed-lora-path")
    if not folder.is_dir():
        raise FilesNotFound(f"{path[:120]} is no folder of an adapter")
    for entry in folder.iterdir():
        if entry.is_symlink() and allowed is not None and not Path(os.path.realpath(entry)).is_relative_to(folder):
            raise StartupError(f"{path[:120]}: {entry.name[:60]} is a link out of the folder")
    return folder
