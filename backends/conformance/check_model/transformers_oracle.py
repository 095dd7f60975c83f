"""A checkpoint in transformers, float32 on the CPU: its logits, the outputs of its parts, and its configuration
keys.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.conformance.check_result import Skipped
from trencadis.core.json_types import JsonObject

SMALL = {
    "hidden_size": 64, "n_embd": 64, "word_embed_proj_dim": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96,
    "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "head_dim": 16, "sliding_window": 24, "projection_dim": 64, "global_head_dim": 32,
    "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "shared_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 32,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32,
}  # fmt: skip
"""Upper limits of the sizes of a random checkpoint."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files that configure an image processor."""

Outputs = dict[str, Tensor]


def find_model_class(path: Path) -> Any:
    """Returns transformers' class of a checkpoint's model; raises Skipped if it has none."""
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    held = json.loads((path / "config.json").read_text(encoding="utf-8"))
    name = (held.get("architectures") or ["none"])[0]
    found = getattr(transformers, name, None)
    if found is None:
        raise Skipped(f"transformers {transformers.__version__} has no {name}")
    return found


def read_declared_keys(path: Path) -> JsonObject:
    """Returns the keys that the configuration's class declares itself, with their defaults; None for a key without
    one.
    """
    kind = find_model_class(path).config_class
    shared = {field.name for base in kind.__mro__[1:] if dataclasses.is_dataclass(base)
              for field in dataclasses.fields(base)}  # fmt: skip
    own = [field for field in dataclasses.fields(kind) if field.name not in shared]
    return {f.name: None if f.default is dataclasses.MISSING else f.default for f in own}


def _value_of(whole: object, raw: JsonObject, key: str) -> int | None:
    """Returns a size of a configuration, or that of its file where transformers has one for each layer."""
    try:
        found: int | None = getattr(whole, key, raw.get(key))
    except RuntimeError:
        found = raw.get(key)
    return found


def _shrink(raw: JsonObject, whole: Any) -> None:
    """Limits the keys of a configuration, or of a part of one, to the sizes of a random checkpoint."""
    shared = _value_of(whole, raw, "num_key_value_heads") == getattr(whole, "num_attention_heads", None)
    for key, size in SMALL.items():
        size = 4 if key == "num_key_value_heads" and shared else size
        if (_value_of(whole, raw, key) or 0) > size and (key in raw or hasattr(type(whole), key)):
            raw[key] = size
    if isinstance(raw.get("layer_types"), list):
        kinds = dict.fromkeys(raw["layer_types"])  # one layer of each kind, if there are enough layers
        raw["layer_types"] = [*kinds, *raw["layer_types"]][: SMALL["num_hidden_layers"]]
    for key in ("layers_block_type", "hybrid_override_pattern"):  # a list or a text: one layer of each kind
        if raw.get(key):
            kinds = dict.fromkeys(raw[key])
            raw[key] = "".join(kinds) if isinstance(raw[key], str) else [*kinds]
            raw.pop("num_hidden_layers", None)
    most = SMALL["vocab_size"]
    for key in [key for key in raw if key.endswith(("token_id", "token_index"))]:
        if isinstance(raw[key], int) and raw[key] >= most:
            raw[key] = most - 1 if "image" in key else 1


def write_dummy(path: Path, folder: Path, seed: int) -> None:
    """Writes a small checkpoint to ``folder``: ``path``/config.json with smaller sizes, every parameter random."""
    import transformers
    from safetensors.torch import save_file

    kind, raw = find_model_class(path), json.loads((path / "config.json").read_text(encoding="utf-8"))
    whole = transformers.AutoConfig.from_pretrained(path)
    _shrink(raw, whole)
    for part in ("text_config", "vision_config"):
        if isinstance(raw.get(part), dict) and hasattr(whole, part):
            _shrink(raw[part], getattr(whole, part))
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROCESSORS:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)
    (folder / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    model = kind(transformers.AutoConfig.from_pretrained(folder)).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=generator)
            plain = values * 0.2 if name.endswith("bias") else 1 + 0.2 * values
            p.copy_(plain if p.ndim == 1 else values / p.shape[-1] ** 0.5)
    held = model.state_dict()
    if getattr(model.config, "tie_word_embeddings", False):
        held.pop("lm_head.weight", None)
    save_file({n: t.clone().contiguous() for n, t in held.items()}, folder / "model.safetensors")


@dataclasses.dataclass(frozen=True)
class ProcessedImage:
    """An image: the output of transformers' processor, and the token id that stands for its rows."""

    inputs: dict[str, Tensor]
    token: int


def open_image_processor(path: Path) -> Any:
    """Opens the checkpoint's image processor, by Pillow; raises Skipped if transformers makes none."""
    import transformers

    library: Any = transformers
    try:
        return library.AutoImageProcessor.from_pretrained(path, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Skipped(f"transformers makes no image processor of it: {why[:100]}") from None


def process_image(path: Path, image: object, token: int) -> ProcessedImage:
    """Processes an image with the checkpoint's image processor."""
    processor = open_image_processor(path)
    made = processor(images=[image], return_tensors="pt", **processor_arguments(path, processor))
    return ProcessedImage(dict(made), token)


def processor_arguments(path: Path, images: Any) -> dict[str, Any]:
    """Returns the arguments that the processor of images and texts, which needs a tokenizer, passes to the image
    processor.
    """
    import transformers
    from transformers.models.auto import processing_auto

    config: Any = transformers.AutoConfig.from_pretrained(path)
    names: dict[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    kind: Any = getattr(transformers, names.get(config.model_type) or "none", None)
    try:
        asked = dict(getattr(kind, "images_kwargs", None) or {})
    except ImportError:  # the module of the class lacks a library
        asked = {}
    asked.pop("return_tensors", None)  # callers ask for tensors themselves
    merge: int = getattr(config, "spatial_merge_size", 1)
    patch: Any = getattr(images, "patch_size", None)
    if merge > 1 and hasattr(patch, "keys"):
        asked["patch_size"] = {side: merge * patch[side] for side in ("height", "width")}
    return asked


class TransformersAnswers:
    """A checkpoint's model and image processor.

    Args:
        path: folder of the checkpoint.
        image_token: the id that stands for an image's rows in a prompt.
        eos: ids that end an answer.

    Raises:
        Skipped: transformers has no such model, or makes no image processor of the folder.
    """

    def __init__(self, path: Path, image_token: int, eos: Sequence[int]) -> None:
        self._token, self._eos = image_token, list(eos)
        self._model = find_model_class(path).from_pretrained(path, dtype=torch.float32).eval()
        self._processor = open_image_processor(path)
        self._arguments = processor_arguments(path, self._processor)
        self._known = inspect.signature(self._model.forward).parameters

    def answer(self, ids: Sequence[int], images: Sequence[object], length: int) -> list[int]:
        """Returns at most ``length`` token ids, without those that end an answer.

        Args:
            ids: the prompt, with a placeholder for each row of an image.
            images: PIL images in order.
        """
        prompt = torch.tensor([list(ids)])
        marks = (prompt == self._token).long()
        given: dict[str, Tensor] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        given |= {key: marks for key in ("token_type_ids", "mm_token_type_ids") if key in self._known}
        if images:
            made = dict(self._processor(images=list(images), return_tensors="pt", **self._arguments))
            given |= {key: value for key, value in made.items() if key in self._known}
        with torch.inference_mode():
            found = self._model.generate(
                **given, max_new_tokens=length, do_sample=False, num_beams=1, eos_token_id=self._eos or None,
                pad_token_id=self._eos[0] if self._eos else 0, temperature=None, top_p=None, top_k=None,
                repetition_penalty=1.0,
            )  # fmt: skip
        answer: list[int] = found[0, len(ids) :].tolist()
        return answer[:-1] if answer and answer[-1] in self._eos else answer


MIXERS = ("Attention", "GatedDeltaNet", "MambaLayer", "Mixer", "ShortConv")
"""Ends of the names of modules that mix tokens."""


READERS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm", "pre_ff_layernorm")
"""transformers' names of the norm before an MLP, whose input is the sum after attention."""

MLP_NAMES = ("MLP", "MoeBlock", "MoeMoE", "HybridMoE", "NemotronHMoE")
"""Parts of the names of transformers' classes of MLPs and of experts with their router."""

POST_MLP_NORM = "post_feedforward_layernorm"
"""transformers' name of a norm after an MLP."""


class TransformersOracle:
    """A checkpoint's model in transformers, as the reference."""

    def __init__(self, path: Path, generates: bool = True) -> None:
        self.generates = generates
        self.model: Any = find_model_class(path).from_pretrained(path, dtype=torch.float32).eval()

    @property
    def names(self) -> set[str]:
        """Names of its parameters and stored buffers."""
        return set(self.model.state_dict())

    def logits(self, ids: list[int], prefix: int = 0, image: ProcessedImage | None = None) -> Tensor:
        """Returns logits, float32 [n, vocabulary]; hidden rows [n, hidden] of a model without an output head.

        ``prefix``: tokens of a prompt that all see each other; ``image``: the prompt's image.
        """
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if prefix:
            given["token_type_ids"] = (torch.arange(len(ids)) >= prefix).long()[None]
        if image is not None:
            known = inspect.signature(self.model.forward).parameters
            marks = (given["input_ids"] == image.token).long()
            given = {**{key: marks for key in ("token_type_ids", "mm_token_type_ids") if key in known}, **given}
            given |= {key: value for key, value in image.inputs.items() if key in known}
            if "cross_attention_mask" in known:
                given["cross_attention_mask"] = _make_tile_mask(image, marks[0])
        with torch.inference_mode():
            found: Tensor
            if self.generates:
                found = self.model(**given, use_cache=False).logits[0]
            else:
                found = self.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return found

    def rows(self, image: ProcessedImage, cross_layers: tuple[int, ...] = ()) -> Tensor:
        """Returns the rows that stand for an image in a prompt, float32 [rows, hidden].

        With ``cross_layers``, the layers that use cross-attention: [rows, keys and values of these layers, one after
        the other].
        """
        if cross_layers:
            return self._project_keys_values(image, cross_layers)
        known = inspect.signature(self.model.get_image_features).parameters
        if "pixel_values" not in known:  # it passes everything on
            known = inspect.signature(self.model.model.get_image_features).parameters
        with torch.inference_mode():
            found = self.model.get_image_features(**{k: v for k, v in image.inputs.items() if k in known})
        found = getattr(found, "pooler_output", found)
        parts = found if isinstance(found, list | tuple) else [found]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).float()

    def _project_keys_values(self, image: ProcessedImage, cross_layers: tuple[int, ...]) -> Tensor:
        inner, found = self.model.model, list[Tensor]()
        known = inspect.signature(inner.vision_model.forward).parameters
        with torch.inference_mode():
            states = inner.vision_model(**{k: v for k, v in image.inputs.items() if k in known}).last_hidden_state
            states = inner.multi_modal_projector(states)
            states = states.reshape(-1, states.shape[-1])
            for layer in (inner.language_model.layers[index].cross_attn for index in cross_layers):
                k = layer.k_norm(layer.k_proj(states).view(len(states), -1, layer.head_dim))
                found += [k.reshape(len(states), -1), layer.v_proj(states)]
        return torch.cat(found, dim=1).float()

    def parts(self, ids: list[int], layers: int, prefix: int = 0) -> Outputs:
        """Returns the output of each part of each layer, [n, width], in the order of computation, and then the
        logits.
        """
        modules = self.model.modules()
        stack: Any = next((m for m in modules if isinstance(m, torch.nn.ModuleList) and len(m) == layers), None)
        if stack is None:
            raise Skipped(f"transformers' model has no list of {layers} layers to look into")
        outputs: Outputs = {}
        hooks = [stack[0].register_forward_pre_hook(_note_input("embeddings", outputs), with_kwargs=True)]
        for i, layer in enumerate(stack):
            # If there are norms after attention too, another norm reads the sum; if there are only norms after both,
            # none does.
            alone = hasattr(layer, POST_MLP_NORM) and not hasattr(layer, READERS[0])
            reader = "" if alone else next((n for n in READERS if hasattr(layer, n)), "")
            mlps = [m for m in layer.children() if any(part in type(m).__name__ for part in MLP_NAMES)]
            for name, child in layer.named_children():
                # modules with ``output`` include a sum and a norm
                if type(child).__name__.endswith(MIXERS) and not hasattr(child, "output"):
                    hooks.append(child.register_forward_hook(_note_output(f"attention of layer {i}", outputs)))
                elif [child] == mlps:  # of several, only the sum is comparable
                    hooks.append(child.register_forward_hook(_note_output(f"MLP of layer {i}", outputs)))
                elif name == reader:
                    hook = _note_input(f"sum behind attention of layer {i}", outputs)
                    hooks.append(child.register_forward_pre_hook(hook, with_kwargs=True))
            hooks.append(layer.register_forward_hook(_note_output(f"sum behind layer {i}", outputs)))
        try:
            outputs["logits"] = self.logits(ids, prefix)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs


def _make_tile_mask(image: ProcessedImage, marks: Tensor) -> Tensor:
    """Returns int64 [1, n, 1, tiles]: tokens from an image's mark on see the tiles that it fills, those before it
    none.
    """
    behind = marks.cumsum(0) > 0
    return (behind[:, None] * image.inputs["aspect_ratio_mask"].reshape(1, -1))[None, :, None].long()


def _note(name: str, outputs: Outputs, value: Any) -> None:
    tensor = value[0] if isinstance(value, tuple) else value
    outputs[name] = tensor.detach().clone().reshape(-1, tensor.shape[-1])


def _note_input(name: str, outputs: Outputs) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _note(name, outputs, args[0] if args else kwargs["hidden_states"])

    return hook


def _note_output(name: str, outputs: Outputs) -> Callable[..., None]:
    return lambda module, args, out: _note(name, outputs, out)
