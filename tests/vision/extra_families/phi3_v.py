"""Phi-3.5-vision, which transformers has not: its CLIP tower and its Phi-3, composed by the published rules.

The rules are those of the checkpoint's own processing_phi3_v.py and modeling_phi3_v.py, written anew.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from tests.fakes import checkpoints
from tests.vision.vision_checkpoints import IMAGE, finished

BOS = checkpoints.IDS["<|endoftext|>"]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MARK = re.compile(r"<\|image_(\d+)\|>")
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
AT = "model.vision_embed_tokens."


def settings(image: int, vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    """config.json, with the keys of the published one; img_processor has the tower's sizes as well."""
    held = {"max_position_embeddings": 2048, "original_max_position_embeddings": 2048, **text}
    decoder = checkpoints.text_settings(**held)
    half = decoder["hidden_size"] // decoder["num_attention_heads"] // 2
    scaling = {
        "type": "su",
        "short_factor": [1 + i / 10 for i in range(half)],
        "long_factor": [4.0 + i for i in range(half)],
    }
    tower = {
        "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 2,
        "image_size": image, "patch_size": 14, **vision,
    }  # fmt: skip
    return {
        "model_type": "phi3_v", "architectures": ["Phi3VForCausalLM"], "torch_dtype": "float32", "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "attention_dropout": 0.0, "hidden_act": "silu", "rope_theta": 10000.0, "use_cache": True,
        "rope_scaling": scaling, "sliding_window": None, "image_token_id": IMAGE, **decoder,
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
            "use_hd_transform": True, "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": tower["hidden_size"], "model_name": "openai/clip-vit-large-patch14-336",
            "name": "clip_vision_model", "num_img_tokens": (image // 28) ** 2, **tower,
        },
    }  # fmt: skip


class Composed(torch.nn.Module):
    """The model of a config.json."""

    text: Any
    generation_config: Any

    def __init__(self, held: dict[str, Any]) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM

        super().__init__()
        self.held, sizes = held, held["img_processor"]
        others = ("image_dim_out", "model_name", "name", "num_img_tokens")
        tower = {key: value for key, value in sizes.items() if key not in others}
        self.tower = CLIPVisionModel(CLIPVisionConfig(**tower, projection_dim=16))
        scaling = {**held["rope_scaling"], "rope_type": "longrope", "rope_theta": held["rope_theta"]}
        text = {
            k: v for k, v in held.items() if k not in ("model_type", "architectures", "img_processor", "embd_layer")
        }
        self.text = Phi3ForCausalLM(Phi3Config(**{**text, "rope_scaling": None, "rope_parameters": scaling}))
        wide, out = 4 * sizes["hidden_size"], held["hidden_size"]
        self.projection = torch.nn.Sequential(torch.nn.Linear(wide, out), torch.nn.GELU(), torch.nn.Linear(out, out))
        self.line, self.whole = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1, 1, wide), (1, 1, wide)))

    @classmethod
    def read(cls, path: Path) -> Composed:
        """The model of a folder, with its weights."""
        from safetensors.torch import load_file

        made, held = cls(json.loads((path / "config.json").read_text())), load_file(str(path / "model.safetensors"))
        made.load_state_dict({name: held[made._stored(name)] for name in made.state_dict()})
        return made.eval()

    def save_pretrained(self, folder: Path) -> None:
        """Writes the checkpoint under the published names."""
        from safetensors.torch import save_file

        state = {self._stored(name): tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, str(folder / "model.safetensors"), {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.held))
        self.generation_config.save_pretrained(folder)

    @staticmethod
    def _stored(name: str) -> str:
        for prefix, stored in (
            ("tower.vision_model.", f"{AT}img_processor.vision_model."), ("tower.", f"{AT}img_processor.vision_model."),
            ("projection.", f"{AT}img_projection."), ("text.", ""),
        ):  # fmt: skip
            if name.startswith(prefix):
                return stored + name.removeprefix(prefix)
        return AT + {"line": "sub_GN", "whole": "glb_GN"}[name]

    def get_image_features(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor, numbers: Any = None) -> Any:
        """Rows of images, float32 [tokens, hidden] each; pixel_values: float32 [tiles of all, 3, h, w]."""
        patches = self.tower(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
        made, left, side = [], patches, self.held["img_processor"]["image_size"]
        for height, width in image_sizes.tolist():
            rows, columns = height // side, width // side
            whole, tiles, left = left[:1], left[1 : 1 + rows * columns], left[1 + rows * columns :]
            parts = [self._lines(tiles, rows, columns), self.whole[0], self._lines(whole, 1, 1)]
            made.append(self.projection(torch.cat(parts)))
        return SimpleNamespace(pooler_output=made)

    def _lines(self, tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[tokens, 4 x hidden]: patches of tiles as one image, cells of 2 x 2, a token behind each line."""
        side, wide = math.isqrt(tiles.shape[1]), tiles.shape[2]
        one_image = tiles.view(rows, columns, side, side, wide).transpose(1, 2)
        high, across = rows * side // 2, columns * side // 2
        cells = one_image.reshape(high, 2, across, 2, wide).transpose(1, 2).reshape(high, across, 4 * wide)
        return torch.cat([cells, self.line[0].expand(high, 1, -1)], 1).flatten(0, 1)

    def _embedded(self, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = self.text.get_input_embeddings()(ids)
        if "pixel_values" in given:
            rows = self.get_image_features(given["pixel_values"], given["image_sizes"]).pooler_output
            found[ids == IMAGE] = torch.cat([rows[number - 1] for number in given["numbers"]])
        return found

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> Any:
        given: dict[str, Any] = {k: more.pop(k) for k in ("pixel_values", "image_sizes", "numbers") if k in more}
        return self.text.generate(
            input_ids, inputs_embeds=self._embedded(input_ids, given), attention_mask=attention_mask,
            eos_token_id=[checkpoints.IDS["<|im_end|>"], BOS], pad_token_id=BOS, **more,
        )  # fmt: skip

    def last_row(self, inputs: dict[str, Any]) -> torch.Tensor:
        """float32 [hidden]: the last token's row behind the last norm."""
        with torch.inference_mode():
            embedded = self._embedded(inputs["input_ids"], inputs)
            return self.text.model(inputs_embeds=embedded).last_hidden_state[0, -1]


class Processor:
    """The published processor of a folder: texts, images, and ids with ``IMAGE`` for each row."""

    def __init__(self, path: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        held = json.loads((path / "config.json").read_text())
        self.side = held["img_processor"]["image_size"]
        newer = path / "processor_config.json"
        made = json.loads(newer.read_text()).get("image_processor") if newer.is_file() else None
        made = json.loads((path / "preprocessor_config.json").read_text()) if made is None else made
        self.crops, self.rescale = made.get("num_crops", 1), made.get("rescale_factor", 1 / 255)
        self.mean, self.std = (
            torch.tensor(value if isinstance(value, list | tuple) else [value] * 3, dtype=torch.float32)[:, None, None]
            for value in (made.get("image_mean", MEAN), made.get("image_std", STD))
        )
        self.encoder, self.tokenizer = PreTrainedTokenizerFast.from_pretrained(path), self

    def apply_chat_template(self, messages: list[dict[str, Any]], **how: Any) -> str:
        """Images stand before the text of their message, numbered through the conversation."""
        shown, count = [], 0
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                here = [part for part in content if part["type"] == "image"]
                marks = [f"<|image_{count + i + 1}|>" for i in range(len(here))]
                count += len(here)
                content = "\n".join([*marks, *(part["text"] for part in content if part["type"] == "text")])
            shown.append({**message, "content": content})
        return str(self.encoder.apply_chat_template(shown, **how))

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that an image is resized to."""
        turned = width < height
        width, height = (height, width) if turned else (width, height)
        ratio, scale = width / height, 1
        while scale * np.ceil(scale / ratio) <= self.crops:
            scale += 1
        wide = int((scale - 1) * self.side)
        high = int(wide / ratio)
        return (high, wide) if turned else (wide, high)

    def padded(self, image: Image.Image) -> Image.Image:
        """The image that is cut into tiles."""
        turned = image.width < image.height
        width, height = self.size(*image.size)
        if turned:
            image, width, height = image.transpose(Image.Transpose.TRANSPOSE), height, width
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        tall = int(np.ceil(height / self.side) * self.side)
        made = Image.new("RGB", (width, tall), (255, 255, 255))
        made.paste(image, (0, int((tall - height) / 2)))
        return made.transpose(Image.Transpose.TRANSPOSE) if turned else made

    def count(self, height: int, width: int) -> int:
        """Tokens of an image, by the published formula."""
        wide, high = (int(np.ceil(side / self.side)) for side in self.size(width, height))
        line = self.side // 28
        return (high * wide + 1) * line * line + 1 + (high + 1) * line

    def values(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """float32 [1 + tiles, 3, side, side], the whole image first; (height, width) of what was cut."""
        made = np.array(self.padded(image))
        pixels = torch.from_numpy(made).permute(2, 0, 1).float().mul(self.rescale)
        pixels = (pixels - self.mean) / self.std
        whole = functional.interpolate(pixels[None], size=(self.side, self.side), mode="bicubic")
        rows, columns = made.shape[0] // self.side, made.shape[1] // self.side
        cut = pixels.view(3, rows, self.side, columns, self.side).permute(1, 3, 0, 2, 4)
        return torch.cat([whole, cut.reshape(-1, 3, self.side, self.side)]), made.shape[:2]

    def __call__(self, images: list[Image.Image] | None, text: str, return_tensors: str) -> dict[str, Any]:
        if not images:
            return dict(self.encoder(text, return_tensors=return_tensors, add_special_tokens=False))
        parts = [self.values(image) for image in images]
        numbers, pieces = [int(found) for found in MARK.findall(text)], MARK.split(text)[::2]
        assert set(numbers) == set(range(1, len(images) + 1))
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            ids += self.encoder(piece).input_ids
            if i < len(numbers):
                image = images[numbers[i] - 1]
                ids += [IMAGE] * self.count(image.height, image.width)
        given = torch.tensor([ids])
        return {
            "input_ids": given, "attention_mask": torch.ones_like(given), "numbers": numbers,
            "pixel_values": torch.cat([values for values, _ in parts]),
            "image_sizes": torch.tensor([size for _, size in parts]),
        }  # fmt: skip


def phi3_v(folder: Path, *, seed: int = 0, image: int = 56, crops: int = 4, vision: Any = None, **text: Any) -> Path:
    """A Phi-3.5-vision checkpoint with tiles of ``image`` pixels, whose tokenizer begins each text with a token."""
    from tokenizers import Tokenizer, processors

    processor = {
        "image_processor_type": "Phi3VImageProcessor", "processor_class": "Phi3VProcessor", "num_crops": crops,
        "num_img_tokens": (image // 28) ** 2, "do_convert_rgb": True, "image_mean": list(MEAN), "image_std": list(STD),
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    model = Composed(settings(image, vision or {}, **text))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    finished(model, folder, seed, ["<|image|>"], processor, TEMPLATE, **named)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def same_values(ours: Any, reference: Processor, image: Image.Image) -> None:
    """Holds an image's pixels to the processor's: bytes of tiles bit for bit, the whole as closely as floats allow."""
    one, (want, _) = ours.prepare(image, "d"), reference.values(image)
    found = np.stack([tile.pixels for tile in one.items]).astype(np.int64)
    high, middle, low = np.split(found, 3, axis=2)
    fine = (high << 16 | middle << 8 | low) - 128 * 1024
    *tiles, whole = fine
    side, unit = ours.image // ours.patch, ours.patch

    def cut(values: Any) -> Any:
        """Slots of [3, h, w]: cells of 2 x 2 patches, each by channel, row and column."""
        grid = np.asarray(values).reshape(3, side // 2, 2, unit, side // 2, 2, unit)
        return grid.transpose(1, 4, 2, 5, 0, 3, 6).reshape(side * side, -1)

    made = np.array(reference.padded(image))
    rows, columns = made.shape[0] // ours.image, made.shape[1] // ours.image
    shown = (
        made.reshape(rows, ours.image, columns, ours.image, 3)
        .transpose(0, 2, 4, 1, 3)
        .reshape(-1, 3, ours.image, ours.image)
    )
    assert len(tiles) == len(shown)
    for tile, pixels in zip(tiles, shown, strict=True):
        assert (tile == 1024 * cut(pixels).astype(np.int64)).all(), image.size
    channel = np.repeat(np.arange(3), unit * unit)
    mean, std = (value.flatten().double().numpy()[channel] for value in (reference.mean, reference.std))
    values = (whole / 1024 * reference.rescale - mean) / std
    wide = max(1.0, float(((reference.rescale * 255 + np.abs(mean)) / std).max()) / 6)
    assert np.abs(values - cut(want[0])).max() < 5e-6 * wide, image.size
