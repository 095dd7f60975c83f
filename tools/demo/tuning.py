"""Teaches an exported checkpoint to write short JSON while it keeps what it knows about images; slices resume."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from demo.export import from_hub, to_hub
from demo.language import tokenizer
from demo.language.json_objects import JsonWriter
from demo.model import DemoModel
from demo.packing import IM_END, USER, Batch, Encoder, Row, collate, turn
from demo.sampling import Mix, training_batch

ROWS = 12
"""JSON answers of a step."""
IMAGES = 900.0
"""``cost`` of a step's images (``sampling.training_batch``)."""
RATE = 5e-4


@dataclass(frozen=True)
class Tuning:
    """The settings of a run.

    Args:
        source: folder of the exported checkpoint that it starts from.
        out: where the tuned weights are written.
        folder: the run's state.
        steps: planned for all slices together.
    """

    source: Path
    out: Path
    folder: Path
    steps: int
    slice_minutes: float
    seed: int = 0


def _json_loss(model: DemoModel, encode: Encoder, writer: JsonWriter) -> tuple[Tensor, float]:
    """Returns the loss of a batch of JSON answers, and the share of tokens that are right."""
    rows = []
    for _ in range(ROWS):
        system, question, answer = writer.draw()
        row = Row()
        root = row.add(-1, encode(f"<|im_start|>system\n{system}{IM_END}"))
        row.add(root, *turn(encode, question, answer, USER), "json")
        rows.append(row)
    batch = collate(rows, [], (2, 2))
    dtype = model.embed.dtype
    hidden = model.text(batch.ids, None, batch.positions, batch.mask.to(dtype))
    scores = model.logits(hidden.flatten(0, 1)[batch.sources]).float()
    right = (scores.detach().argmax(-1) == batch.targets).float().mean()
    return F.cross_entropy(scores, batch.targets), float(right)


def _keep_loss(model: DemoModel, teacher: DemoModel, batch: Batch) -> Tensor:
    """Returns how far the model's answers about images are from the teacher's (KL, nats a token)."""
    assert batch.patches is not None
    with torch.no_grad():
        features = teacher.vision(batch.patches, batch.grid)
        known = teacher.text(batch.ids, features, batch.positions, batch.mask).flatten(0, 1)[batch.sources]
        wanted = teacher.logits(known).float().log_softmax(-1)
    hidden = model.text(batch.ids, features, batch.positions, batch.mask).flatten(0, 1)[batch.sources]
    return F.kl_div(model.logits(hidden).float().log_softmax(-1), wanted, reduction="batchmean", log_target=True)


def _load(model: DemoModel, tuning: Tuning, adam: torch.optim.AdamW) -> int:
    path = tuning.folder / "tuning.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    return int(state["step"])


def _save(model: DemoModel, tuning: Tuning, adam: torch.optim.AdamW, step: int) -> None:
    part = tuning.folder / "tuning.part"
    torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "step": step}, part)
    os.replace(part, tuning.folder / "tuning.pt")


def tune(tuning: Tuning) -> None:
    """Runs one slice; writes the weights once all steps are done. The tower does not change."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer.build()
    encode, model, teacher = Encoder(words), from_hub(tuning.source).train(), from_hub(tuning.source)
    trained = [p for name, p in model.named_parameters() if not name.startswith(("vision", "aux"))]
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(("vision", "aux")))
    adam = torch.optim.AdamW(trained, RATE, betas=(0.9, 0.98), weight_decay=0.0)
    step, end = _load(model, tuning, adam), time.monotonic() + 60 * tuning.slice_minutes
    told = time.monotonic()
    while step < tuning.steps and time.monotonic() < end:
        done = step / tuning.steps
        for group in adam.param_groups:
            group["lr"] = RATE * min(1.0, step / 20 + 0.05) * 0.5 * (1 + math.cos(math.pi * done))
        rng = Random(f"tune {tuning.seed} {step}")
        loss, right = _json_loss(model, encode, JsonWriter(words, rng))
        kept = _keep_loss(model, teacher, training_batch(rng, encode, Mix(), 1.0, IMAGES))
        (0.2 * loss + 5 * kept).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad()
        step += 1
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(
                f"step {step}: json {float(loss.detach()):.3f} ({right:.3f} right), images {float(kept.detach()):.4f}",
                flush=True,
            )
    _save(model, tuning, adam, step)
    if step >= tuning.steps:
        save_file(to_hub(model), tuning.out / "model.safetensors", {"format": "pt"})
        (tuning.out / "model.safetensors").chmod(0o644)
    print(f"{step} of {tuning.steps} steps")
