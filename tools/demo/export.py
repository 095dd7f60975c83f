"""Writes the checkpoint as the hub lays it out, and compares it with transformers."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo import config as c
from demo.language import tokenizer
from demo.model import DemoModel
from demo.optimiser import slots
from demo.packing import Encoder, collate, training_row
from demo.sampling import Mix, make_image, pair, sample_grid
from demo.training import load_flat

_FRAME = c.PATCH * c.PATCH


def to_hub(model: DemoModel) -> dict[str, Tensor]:
    """The parameters under the names of the hub's checkpoints; training's own heads are left out."""
    own = {k: v.detach() for k, v in model.named_parameters()}
    out: dict[str, Tensor] = {"model.embed_tokens.weight": own["embed"], "model.norm.weight": own["norm"]}
    patch = own["vision.patch.weight"].view(c.VISION, 3, 1, c.PATCH, c.PATCH) / 2  # half for each of two equal frames
    out["visual.patch_embed.proj.weight"] = patch.expand(-1, -1, 2, -1, -1)
    out["visual.merger.ln_q.weight"] = own["vision.norm"]
    for i in range(c.VISION_LAYERS):
        at, to = f"vision.blocks.{i}", f"visual.blocks.{i}"
        for part in ("norm1", "norm2"):
            out[f"{to}.{part}.weight"] = own[f"{at}.{part}"]
        for kind in ("weight", "bias"):
            out[f"{to}.attn.qkv.{kind}"] = own[f"{at}.qkv.{kind}"]
            out[f"{to}.attn.proj.{kind}"] = own[f"{at}.proj.{kind}"]
            out[f"{to}.mlp.gate_proj.{kind}"], out[f"{to}.mlp.up_proj.{kind}"] = own[f"{at}.mlp.gate_up.{kind}"].chunk(
                2
            )
            out[f"{to}.mlp.down_proj.{kind}"] = own[f"{at}.mlp.down.{kind}"]
    for kind in ("weight", "bias"):
        out[f"visual.merger.mlp.0.{kind}"] = own[f"vision.merge1.{kind}"]
        out[f"visual.merger.mlp.2.{kind}"] = own[f"vision.merge2.{kind}"]
    for i in range(c.TEXT_LAYERS):
        at, to = f"layers.{i}", f"model.layers.{i}"
        out[f"{to}.input_layernorm.weight"] = own[f"{at}.norm1"]
        out[f"{to}.post_attention_layernorm.weight"] = own[f"{at}.norm2"]
        for kind in ("weight", "bias"):
            parts = own[f"{at}.qkv.{kind}"].split([c.Q_HEADS * c.HEAD, c.KV_HEADS * c.HEAD, c.KV_HEADS * c.HEAD])
            for name, part in zip(("q", "k", "v"), parts, strict=True):
                out[f"{to}.self_attn.{name}_proj.{kind}"] = part
        out[f"{to}.self_attn.o_proj.weight"] = own[f"{at}.out.weight"]
        out[f"{to}.mlp.gate_proj.weight"], out[f"{to}.mlp.up_proj.weight"] = own[f"{at}.mlp.gate_up.weight"].chunk(2)
        out[f"{to}.mlp.down_proj.weight"] = own[f"{at}.mlp.down.weight"]
    return {k: v.to(torch.bfloat16).contiguous().clone() for k, v in out.items()}


def from_hub(folder: Path) -> DemoModel:
    """The exported checkpoint in this package's own model, in float32."""
    hub = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    model = DemoModel()
    own = {k: v.data for k, v in model.named_parameters()}
    own["embed"].copy_(hub["model.embed_tokens.weight"])
    own["norm"].copy_(hub["model.norm.weight"])
    own["vision.patch.weight"].copy_(hub["visual.patch_embed.proj.weight"].sum(2).reshape(c.VISION, 3 * _FRAME))
    own["vision.norm"].copy_(hub["visual.merger.ln_q.weight"])
    for i in range(c.VISION_LAYERS):
        at, to = f"vision.blocks.{i}", f"visual.blocks.{i}"
        for part in ("norm1", "norm2"):
            own[f"{at}.{part}"].copy_(hub[f"{to}.{part}.weight"])
        for kind in ("weight", "bias"):
            own[f"{at}.qkv.{kind}"].copy_(hub[f"{to}.attn.qkv.{kind}"])
            own[f"{at}.proj.{kind}"].copy_(hub[f"{to}.attn.proj.{kind}"])
            own[f"{at}.mlp.gate_up.{kind}"].copy_(torch.cat([hub[f"{to}.mlp.{n}_proj.{kind}"] for n in ("gate", "up")]))
            own[f"{at}.mlp.down.{kind}"].copy_(hub[f"{to}.mlp.down_proj.{kind}"])
    for kind in ("weight", "bias"):
        own[f"vision.merge1.{kind}"].copy_(hub[f"visual.merger.mlp.0.{kind}"])
        own[f"vision.merge2.{kind}"].copy_(hub[f"visual.merger.mlp.2.{kind}"])
    for i in range(c.TEXT_LAYERS):
        at, to = f"layers.{i}", f"model.layers.{i}"
        own[f"{at}.norm1"].copy_(hub[f"{to}.input_layernorm.weight"])
        own[f"{at}.norm2"].copy_(hub[f"{to}.post_attention_layernorm.weight"])
        for kind in ("weight", "bias"):
            own[f"{at}.qkv.{kind}"].copy_(torch.cat([hub[f"{to}.self_attn.{n}_proj.{kind}"] for n in "qkv"]))
        own[f"{at}.out.weight"].copy_(hub[f"{to}.self_attn.o_proj.weight"])
        own[f"{at}.mlp.gate_up.weight"].copy_(torch.cat([hub[f"{to}.mlp.{n}_proj.weight"] for n in ("gate", "up")]))
        own[f"{at}.mlp.down.weight"].copy_(hub[f"{to}.mlp.down_proj.weight"])
    return model.eval()


@torch.inference_mode()
def worst_difference(folder: Path, rounds: int = 6) -> float:
    """The largest gap between this model's logits and those of transformers, both in float32."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ours = from_hub(folder)
    encode = Encoder(tokenizer.build())
    rng = Random(99)
    worst = 0.0
    for i in range(rounds):
        grid = sample_grid(rng, 32 if i % 2 else 64)
        shown = pair(grid, rng) if i % 2 else [make_image(grid, rng, Mix())]
        row = training_row(shown, grid, encode, rng, 1)
        while any(s.parent != at - 1 for at, s in enumerate(row.segments)):  # a plain sequence is wanted
            row = training_row(shown, grid, encode, rng, 1)
        batch = collate([row], shown, grid)
        length = sum(len(s.ids) for s in row.segments)
        assert batch.patches is not None
        features = ours.vision(batch.patches, grid)
        hidden = ours.text(batch.ids, features, batch.positions, batch.mask)
        mine = ours.logits(hidden)[0, :length]
        pixels = batch.patches.reshape(-1, 3, 1, _FRAME).expand(-1, -1, 2, -1).reshape(-1, 6 * _FRAME)
        ids = batch.ids[:, :length]
        yours = reference(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, grid[0] * 2, grid[1] * 2]] * len(shown)),
            mm_token_type_ids=(ids == c.IDS["<|image_pad|>"]).int(),
        ).logits[0]  # fmt: skip
        worst = max(worst, float((mine - yours).abs().max()))
    return worst


def export(state: Path, folder: Path, check: bool) -> None:
    """Writes all files of the checkpoint from the state of a run."""
    model = DemoModel()
    load_flat(model, slots(model), torch.load(state)["flat"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_hub(model), folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(tokenizer.build(), folder)
    c.write(folder)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")
    if check:
        print(f"largest difference from transformers' logits in float32: {worst_difference(folder):.1e}")
