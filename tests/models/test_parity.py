"""Logits equal transformers' in float32, whatever the chunks, the padding and the packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trencadis.backends.cpu import make_backend
from trencadis.core.backend import BackendConfig, LayerKV, SamplerState
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.models.config import load_config
from trencadis.core.models.interface import Persistent
from trencadis.core.models.registry import build
from trencadis.core.step import Encode, StepInputs
from trencadis.multimodal.packing import slots_of

BLOCK, BLOCKS, ARENA = 4, 64, 512


class Rig:
    """A model on the CPU with a cache, driven by hand as the runner would."""

    def __init__(self, path: Path, policy: str = "serving", ops: str = "fast") -> None:
        self.config = load_config(path)
        c = self.config.text
        options = {"policy": policy, "ops": ops, "threads": "1"}
        self.backend = make_backend(BackendConfig(block_size=BLOCK, vocab_size=c.vocab, options=options))
        self.model: Any = build(self.config, self.backend)
        bits = -(-c.vocab // 8)
        self.state = SamplerState(
            torch.zeros(9, dtype=torch.int32), torch.zeros(9, c.vocab, dtype=torch.int32),
            torch.zeros(9, bits, dtype=torch.uint8), torch.zeros(9, 300, dtype=torch.int64), torch.zeros(9, 300),
        )  # fmt: skip
        shape = (BLOCKS, BLOCK, c.kv_heads, c.head_dim)
        kv = [LayerKV(torch.zeros(shape), torch.zeros(shape)) for _ in range(c.layers)]
        self.kv = kv
        self.hidden, self.arena = torch.zeros(256, c.hidden), torch.zeros(ARENA, c.hidden)
        self.model.bind(Persistent(kv, self.hidden, self.arena, self.state))
        order = np.random.default_rng(3).permutation(np.arange(2, BLOCKS)).astype(np.int32)
        self.blocks = order[None]

    def run(self, stage: Stage, body: Any, inputs: Any, *needs: int) -> Any:
        policy = self.backend.policy
        dims = [-(-n // a) * a for n, a in zip(needs, policy.alignment[stage], strict=True)]
        program = self.backend.program(Bucket(stage, tuple(dims)), body)
        self.backend.fill(program, inputs)
        return program.run()

    def prefill(self, ids: list[int], chunk: int, positions: Any = None, rows: Any = None) -> torch.Tensor:
        """Logits [n, V] of a prompt in chunks; ``rows``: arena row of each token or 0."""
        n = len(ids)
        positions = np.broadcast_to(np.arange(n, dtype=np.int32), (3, n)) if positions is None else positions
        rows = np.zeros(n, np.int32) if rows is None else rows
        out = []
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            size = stop - start
            inputs = StepInputs(
                tokens=np.array(ids[start:stop], np.int32), from_slot=np.zeros(size, np.int32),
                positions=np.ascontiguousarray(positions[:, start:stop]), image_row=rows[start:stop],
                out_row=np.arange(1, size + 1, dtype=np.int32), row_start=np.array([0, size], np.int32),
                context=np.array([start], np.int32), blocks=self.blocks, slot=np.ones(1, np.int32),
                adapter=np.zeros(1, np.int32),
            )  # fmt: skip
            if size == 1:
                self.run(Stage.DECODE, self.model.text, inputs, 1)
            else:
                self.run(Stage.PREFILL, self.model.text, inputs, size, 1)
            with torch.inference_mode():
                out.append(self.model.lm_head(self.hidden[1 : size + 1]).clone())
        return torch.cat(out)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


CASES = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "vl": ("qwen2_5_vl", {}),
    "vl-gqa7": ("qwen2_5_vl", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "vl-tied": ("qwen2_5_vl", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("policy", "ops"), [("serving", "fast"), ("padded", "fast"), ("padded", "reference")])
def test_text_logits(checkpoint: Callable[..., Path], oracle: Any, case: str, policy: str, ops: str) -> None:
    kind, changes = CASES[case]
    path = checkpoint(kind, **changes)
    ids = np.random.default_rng(0).integers(0, 300, 90).tolist()
    with torch.no_grad():
        want = oracle(path)(input_ids=torch.tensor([ids])).logits[0]
    rig = Rig(path, policy, ops)
    for chunk in (1, 7, 90) if ops == "fast" else (7, 90):
        close(rig.prefill(ids, chunk), want)


GRIDS = [(4, 4), (8, 8), (2, 2), (10, 6), (18, 34), (16, 8)]


@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_images_packed_together(vl_checkpoint: Path, oracle: Any, ops: str) -> None:
    rng = np.random.default_rng(1)
    rig, model = Rig(vl_checkpoint, ops=ops), oracle(vl_checkpoint)
    visual = model.model.visual
    mean, std = _clip()
    images, wants, row = [], [], 2
    for h, w in GRIDS:
        pixels = rng.integers(0, 256, (h * w, 1176), dtype=np.uint8)
        rows = np.arange(row, row + h * w // 4, dtype=np.int32)
        images.append(Encode(f"{h}x{w}", (1, h, w), slots_of((1, h, w)), pixels, rows))
        values = (torch.from_numpy(pixels).float() / 255 - mean) / std
        with torch.no_grad():
            wants.append(visual(values, grid_thw=torch.tensor([[1, h, w]])).pooler_output)
        row += h * w // 4
    for chosen in ([0], [1], [3, 2], [0, 1, 2, 3, 4, 5], [5, 4]):
        need = sum(images[i].slots for i in chosen)
        rig.arena.zero_()
        for spare in (0, 128):
            packed = rig.model.pack([images[i] for i in chosen], need + spare)
            rig.run(Stage.VISION, rig.model.vision, packed, need + spare)
            for i in chosen:
                close(rig.arena[images[i].rows.tolist()], wants[i])
        assert not rig.arena[0].any()


def _clip() -> tuple[torch.Tensor, torch.Tensor]:
    from trencadis.multimodal.vision import CLIP_MEAN, CLIP_STD

    return torch.tensor(CLIP_MEAN).repeat_interleave(392), torch.tensor(CLIP_STD).repeat_interleave(392)


def test_image_tokens_and_three_axes(vl_checkpoint: Path, oracle: Any) -> None:
    rng = np.random.default_rng(2)
    n = 40
    ids, rows = rng.integers(0, 300, n), np.zeros(n, np.int32)
    rows[5:17] = 2 + rng.permutation(12)
    positions = rng.integers(0, 500, (3, n)).astype(np.int32)
    rig, model = Rig(vl_checkpoint, "padded"), oracle(vl_checkpoint)
    rig.arena.copy_(torch.from_numpy(rng.standard_normal(rig.arena.shape, np.float32)))
    rig.arena[0] = 0
    with torch.no_grad():
        x = model.get_input_embeddings()(torch.from_numpy(ids))
        x[5:17] = rig.arena[rows[5:17].tolist()]
        hidden = model.model.language_model(
            inputs_embeds=x[None], position_ids=torch.from_numpy(positions)[:, None].long()
        ).last_hidden_state
        want = model.lm_head(hidden[0])
    for chunk in (7, n):
        close(rig.prefill(ids.tolist(), chunk, positions, rows), want)
