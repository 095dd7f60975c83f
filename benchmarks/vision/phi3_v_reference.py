"""Phi-3.5-vision's tower composed of transformers' parts, which has no such model; as much work as its encoder has.

Its lines and separators are left out: they are rows that wait already.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.vision.vision_models import ADDED, CLIP, SMALL, TEXT, TINY

TILES, AT = 5, "model.vision_embed_tokens."
"""Tiles of a square image with four crops, the whole among them; the checkpoint's name of the tower."""


class Composed(torch.nn.Module):
    """CLIP without its last layers, cells of 2 x 2 patches, and the projector; a decoder that is only written."""

    generation_config: Any

    def __init__(self, text: dict[str, Any], tower: dict[str, Any]) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM

        super().__init__()
        self.sizes, self.settings = tower, text
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        self.scaling = {"type": "su", "short_factor": [1.1] * half, "long_factor": [4.0] * half}
        self.tower = CLIPVisionModel(CLIPVisionConfig(**tower))
        self.text = Phi3ForCausalLM(Phi3Config(**text, tie_word_embeddings=False))
        wide, out = 4 * tower["hidden_size"], text["hidden_size"]
        linears = torch.nn.Linear(wide, out), torch.nn.Linear(out, out)
        self.projection = torch.nn.Sequential(linears[0], torch.nn.GELU(), linears[1])
        self.line, self.whole = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1, 1, wide), (1, 1, wide)))

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """float32 [cells of all tiles, hidden] of float32 [tiles, 3, 336, 336]."""
        patches = self.tower(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
        tiles, count, wide = patches.shape
        side = int(count**0.5)
        cells = patches.reshape(tiles, side // 2, 2, side // 2, 2, wide).transpose(2, 3)
        made: torch.Tensor = self.projection(cells.reshape(-1, 4 * wide))
        return made

    def save_pretrained(self, folder: Path) -> None:
        """Writes the checkpoint under the published names."""
        from safetensors.torch import save_file

        state = {self._stored(name): tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, str(folder / "model.safetensors"), {"format": "pt"})
        embedding = {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
            "use_hd_transform": True, "with_learnable_separator": True,
        }  # fmt: skip
        sizes = {k: v for k, v in self.sizes.items() if k not in ("model_type", "projection_dim")}
        tower = {
            "image_dim_out": sizes["hidden_size"], "model_name": "openai/clip-vit-large-patch14-336",
            "name": "clip_vision_model", "num_img_tokens": 144, **sizes,
        }  # fmt: skip
        held = {
            "model_type": "phi3_v", "architectures": ["Phi3VForCausalLM"], "torch_dtype": "float32",
            "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": self.scaling, "sliding_window": None,
            "image_token_id": ADDED, "original_max_position_embeddings": self.settings["max_position_embeddings"],
            **self.settings, "embd_layer": embedding, "img_processor": tower, "tie_word_embeddings": False,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(held))

    @staticmethod
    def _stored(name: str) -> str:
        for prefix, stored in (
            ("tower.vision_model.", f"{AT}img_processor.vision_model."), ("tower.", f"{AT}img_processor.vision_model."),
            ("projection.", f"{AT}img_projection."), ("text.", ""), ("line", f"{AT}sub_GN"), ("whole", f"{AT}glb_GN"),
        ):  # fmt: skip
            if name.startswith(prefix):
                return stored + name.removeprefix(prefix)
        return name


def composed(smoke: bool) -> Composed:
    """The model at half a billion parameters."""
    text, tower = TEXT | (SMALL if smoke else {}), CLIP | (TINY if smoke else {})
    return Composed({k: v for k, v in text.items() if k != "head_dim"}, tower).eval()
