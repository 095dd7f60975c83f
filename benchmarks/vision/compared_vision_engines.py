"""Both engines over one checkpoint of a vision family, in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.checkpoints import DEMO
from benchmarks.vision.vision_models import CROPS, KINDS, SMALL, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

WORDS = "what is in the picture and where does it stand"


def made(kind: Kind, smoke: bool) -> Any:
    """transformers' model, random."""
    import torch
    import transformers

    text = kind.text | ({**SMALL, **kind.small_text} if smoke else {})
    vision = kind.vision | ({k: v for k, v in kind.small.items() if k in kind.vision} if smoke else {})
    config = getattr(transformers, f"{kind.name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, dtype="float32",
        architectures=[f"{kind.name}ForConditionalGeneration"], **kind.root,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{kind.name}ForConditionalGeneration")(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=1004, pad_token_id=1002, do_sample=False)
    return model


def write(model: Any, folder: Path, tokens: Sequence[str], image: dict[str, Any]) -> None:
    """Writes a checkpoint: the model, the demo's tokenizer with ``tokens`` more, and the processor's settings."""
    from tokenizers import AddedToken, Tokenizer

    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((DEMO / "tokenizer_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(image))


def keys_and_values(model: Any, given: dict[str, Any]) -> None:
    """What transformers' layers that attend to images keep of one; ours lie in the arena behind a launch."""
    inner = model.model
    states = inner.multi_modal_projector(inner.vision_model(**given).last_hidden_state)
    states = states.reshape(-1, states.shape[-1])
    for place in model.config.text_config.cross_attention_layers:
        layer = inner.language_model.layers[place].cross_attn
        layer.k_norm(layer.k_proj(states).view(len(states), -1, layer.head_dim))
        layer.v_proj(states)


def seen_tiles(ids: list[int], token: int) -> NDArray[np.int64]:
    """int64 [1, tokens, 1, 4]: which tiles a token attends to of an image that fills one of four."""
    from transformers.models.mllama import processing_mllama

    places = [processing_mllama.get_cross_attention_token_mask(ids, token)]
    made: Any = processing_mllama.convert_sparse_cross_attention_mask_to_dense(places, [[1]], 4, len(ids))
    return np.asarray(made, np.int64)


class Pair:
    """A family's model in both engines."""

    def __init__(self, folder: Path, family: str, threads: int, smoke: bool) -> None:
        import torch

        from trencadis import LLM

        self.kind = KINDS.get(family)
        if self.kind is None:
            from benchmarks.vision.phi3_v_reference import composed

            self.theirs = composed(smoke)
            write(self.theirs, folder, ("<|image|>",), CROPS)
        else:
            self.theirs = made(self.kind, smoke)
            write(self.theirs, folder, self.kind.tokens, self.kind.image)
            module, _, name = self.kind.processor.rpartition(".")
            self.images = getattr(import_module(f"transformers.models.{module}"), name).from_pretrained(folder)
        torch.set_num_threads(threads)
        self.llm = LLM(
            str(folder), dtype="float32", threads=threads, max_model_len=4096, max_num_seqs=4,
            max_num_batched_tokens=4096, enable_prefix_caching=False, mm_processor_cache_gb=0.0,
            kv_cache_memory_bytes=1 << 30,
        )  # fmt: skip
        self.ids: list[int] = []

    def ours_encodes(self, image: Image.Image) -> float:
        """Seconds of the tower, and of what makes rows of its outputs, for an image that is prepared."""
        from trencadis.core.checkpoint.config_reader import load_config
        from trencadis.core.checkpoint.model_config import reserved_rows
        from trencadis.core.checkpoint.model_registry import image_processor
        from trencadis.core.step import Encode, Step

        config = load_config(Path(self.llm.config.model))
        one = image_processor(config, {}).prepare(image, "d")
        items, row = [], reserved_rows(config)
        for i, tile in enumerate(one.items or (one,)):
            rows = np.arange(row, row + tile.tokens, dtype=np.int32)
            items.append(Encode(str(i), tile.grid, tile.slots, tile.pixels, rows))
            row += tile.tokens
        begun = time.perf_counter()
        self.llm.engine.executor.submit(Step(0, (), tuple(items))).result()
        return time.perf_counter() - begun

    def transformers_encode(self, image: Image.Image) -> float:
        """As ``ours_encodes``."""
        import torch

        given = self._given(image)
        begun = time.perf_counter()
        with torch.inference_mode():
            if hasattr(self.theirs, "get_image_features"):
                self.theirs.get_image_features(**given)
            else:
                keys_and_values(self.theirs, given)
        return time.perf_counter() - begun

    def _given(self, image: Image.Image) -> dict[str, Any]:
        if self.kind is None:
            import torch

            from benchmarks.vision.phi3_v_reference import TILES

            return {"pixel_values": torch.rand(TILES, 3, 336, 336)}
        found = self.images(images=[image], return_tensors="pt")
        return {name: found[name] for name in self.kind.given}

    def ours_first(self, image: Image.Image) -> tuple[float, int]:
        """Seconds from a decoded image and a prompt to the first token, and the token."""
        from trencadis import SamplingParams

        mark = self.kind.mark if self.kind else "<|image_1|>"
        prompt: Any = {"prompt": f"{mark} {WORDS}", "multi_modal_data": {"image": image}}
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        found = self.llm.generate(prompt, params, use_tqdm=False)[0]
        seconds = time.perf_counter() - begun
        self.ids = list(found.prompt_token_ids)
        return seconds, found.outputs[0].token_ids[0]

    def transformers_first_token(self, image: Image.Image) -> tuple[float, int]:
        """As ``ours_first``; the prompt's ids are there already."""
        import torch

        if self.kind is None:
            return 0.0, -1  # its decoder is not composed
        ids = torch.tensor([self.ids])
        more: dict[str, Any] = {}
        if self.kind.name.startswith(("Qwen", "Glm", "Gemma4")):
            more["mm_token_type_ids"] = (ids == self.kind.token).int()
        elif self.kind.name == "Gemma3":
            more["token_type_ids"] = (ids == self.kind.token).int()
        elif self.kind.name == "Mllama":
            more["cross_attention_mask"] = torch.from_numpy(seen_tiles(self.ids, self.kind.token))
        begun = time.perf_counter()
        with torch.inference_mode():
            out = self.theirs.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, min_new_tokens=1,
                **self._given(image), **more,
            )  # fmt: skip
        return time.perf_counter() - begun, int(out[0, -1])
