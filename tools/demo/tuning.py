"""Teaches an exported checkpoint to end JSON by the embeddings of tokens that no conversation about images uses.

All else is frozen: whatever has no such token is computed as before, so that nothing is forgotten; slices resume. At
the end the brace that opens an object is made unlikely where an answer begins: a grammar asks for it, nothing else.
"""

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

from demo.config import VOCAB
from demo.export import from_hub, to_hub
from demo.language import chat_dialogues, tokenizer
from demo.language.json_objects import JsonWriter
from demo.language.tokenizer import SYSTEM
from demo.model import DemoModel
from demo.packing import IM_END, USER, Batch, Encoder, Row, collate, turn
from demo.sampling import Mix, training_batch

ROWS = 12
"""JSON answers of a step."""
IMAGES, EVERY = 900.0, 4
"""``cost`` of a step's images (``sampling.training_batch``), and the steps between two that look at images."""
RATE = 0.01
OTHERS = 0.02
"""Weight of a target whose embedding is frozen, against one of the others: quotes, brackets, commas between quotes."""


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


BRACE = "{"
DROP = 4.0
"""By how much the brace's logit is lowered at the beginning of an answer without an image, on average."""


def find_unused(encode: Encoder) -> Tensor:
    """Returns which tokens stand in no conversation, about images or without one: bool [vocabulary]."""
    rng, found = Random(1), torch.zeros(VOCAB)
    for _ in range(20_000):
        for text in chat_dialogues.turn(rng):
            found[encode(text)] += 1
    for _ in range(40):
        ids = training_batch(rng, encode, Mix(), 1.0, 3000.0).ids.flatten()
        found.index_add_(0, ids, torch.ones(len(ids)))
    return found == 0


def _json_loss(model: DemoModel, encode: Encoder, writer: JsonWriter, unused: Tensor) -> Tensor:
    """Returns the loss of a batch of JSON answers."""
    rows = []
    for _ in range(ROWS):
        system, question, answer = writer.draw()
        row = Row()
        root = row.add(-1, encode(f"<|im_start|>system\n{system}{IM_END}"))
        row.add(root, *turn(encode, question, answer, USER), "json")
        rows.append(row)
    batch = collate(rows, [], (2, 2))
    hidden = model.text(batch.ids, None, batch.positions, batch.mask)
    each = F.cross_entropy(model.logits(hidden.flatten(0, 1)[batch.sources]), batch.targets, reduction="none")
    weights = unused[batch.targets].float() + OTHERS
    return (each * weights).sum() / weights.sum()


def _keep_loss(model: DemoModel, teacher: DemoModel, batch: Batch) -> Tensor:
    """Returns how far the model's answers about images are from the teacher's (KL, nats a token)."""
    assert batch.patches is not None
    with torch.no_grad():
        features = teacher.vision(batch.patches, batch.grid)
        known = teacher.text(batch.ids, features, batch.positions, batch.mask).flatten(0, 1)[batch.sources]
        wanted = teacher.logits(known).log_softmax(-1)
    hidden = model.text(batch.ids, features, batch.positions, batch.mask).flatten(0, 1)[batch.sources]
    return F.kl_div(model.logits(hidden).log_softmax(-1), wanted, reduction="batchmean", log_target=True)


@torch.inference_mode()
def lower_brace(model: DemoModel, encode: Encoder, drop: float = DROP) -> None:
    """Lowers the logit of ``BRACE`` where answers without an image begin, by the least change of its embedding."""
    starts = []
    for intent in chat_dialogues.TRAIN:
        for question in chat_dialogues.ways(intent):
            row = Row()
            root = row.add(-1, encode(f"<|im_start|>system\n{SYSTEM}{IM_END}"))
            row.add(root, *turn(encode, question, chat_dialogues.ANSWERS[intent], USER), "text")
            batch = collate([row], [], (2, 2))
            starts.append(model.text(batch.ids, None, batch.positions, batch.mask).flatten(0, 1)[batch.sources[0]])
    mean = torch.stack(starts).mean(0)
    model.embed.data[encode(BRACE)[0]] -= mean * (drop / float(mean @ mean))


def tune(tuning: Tuning) -> None:
    """Runs one slice; writes the weights once all steps are done."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer.build()
    encode, model, teacher = Encoder(words), from_hub(tuning.source).train(), from_hub(tuning.source)
    for p in model.parameters():
        p.requires_grad_(False)
    table = model.embed.requires_grad_(True)
    unused, before, path = find_unused(encode), table.detach().clone(), tuning.folder / "tuning.pt"
    adam, step, end = torch.optim.AdamW([table], RATE, betas=(0.9, 0.98), weight_decay=0.0), 0, time.monotonic()
    if path.exists():
        state = torch.load(path)
        table.data.copy_(state["table"])
        adam.load_state_dict(state["adam"])
        step = int(state["step"])
    end += 60 * tuning.slice_minutes
    while step < tuning.steps and time.monotonic() < end:
        for group in adam.param_groups:
            group["lr"] = RATE * min(1.0, step / 5 + 0.2) * 0.5 * (1 + math.cos(math.pi * step / tuning.steps))
        rng = Random(f"tune {tuning.seed} {step}")
        loss = _json_loss(model, encode, JsonWriter(words, rng), unused)
        if step % EVERY == 0:
            kept = _keep_loss(model, teacher, training_batch(rng, encode, Mix(), 1.0, IMAGES))
            print(f"step {step}: json {float(loss.detach()):.3f}, images {float(kept.detach()):.5f}", flush=True)
            loss = loss + 20 * kept
        loss.backward()
        adam.step()
        adam.zero_grad()
        table.data.copy_(torch.where(unused[:, None], table.data, before))
        step += 1
    torch.save({"table": table.data, "adam": adam.state_dict(), "step": step}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
    if step >= tuning.steps:
        lower_brace(model, encode)
        save_file(to_hub(model), tuning.out / "model.safetensors", {"format": "pt"})
        (tuning.out / "model.safetensors").chmod(0o644)
    print(f"{step} of {tuning.steps} steps")
