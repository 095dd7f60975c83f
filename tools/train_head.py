#!/usr/bin/env python3
"""Trains a head of EAGLE-3 for the bundled demo checkpoint, on one CPU in a few minutes.

python tools/train_head.py --out build/demo-eagle3 [--minutes 6] [--questions 400]
python tools/train_head.py --out build/demo-eagle3 --only-measure
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo.language.held_out import Item, items
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.launches.draft_runner import follow

TAPS, STEPS, BATCH, LENGTH = (1, 2, 3), 3, 16, 112
"""Tapped layers; drafts that a training step unrolls; texts of a step; most tokens of a text."""

FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16}


@dataclass
class Recorder:
    """Stands in place of a head and keeps what one would read."""

    llm: LLM
    states: dict[int, list[Tensor]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)

    def read(self, step: Any, persistent: Any, launched: Any, samples: Any, output: Any) -> list[Any]:
        """Takes the hidden states of each row, and the ids that follow its tokens."""
        states = self.llm.engine.executor._rank.model.persistent.states  # type: ignore[attr-defined]
        drawn, ((_, inputs),) = None if output is None else output.result().token, launched
        for at, key in enumerate(persistent):
            self._take(key, states[at + 1 : at + 2], [int(drawn[at])])
        for index, row in enumerate(step.rows, len(persistent)):
            start, stop = inputs.row_start[index], inputs.row_start[index + 1]
            first = samples.get(row.key) if row.samples else None
            ids, _ = follow(row, None if first is None else drawn[first:])
            self._take(row.key, states[start + 1 : stop + 1], ids)
        return []

    def _take(self, key: int, states: Tensor, ids: list[int]) -> None:
        self.states.setdefault(key, []).append(states.clone())
        self.ids.setdefault(key, []).extend(ids)


def keep_side_by_side(low: Tensor, middle: Tensor, high: Tensor, out_row: Tensor, states: Tensor) -> None:
    """Stores the states of three layers [n, hidden] in rows of ``states``, in place of a head's projection."""
    states.index_copy_(0, out_row, torch.cat([low, middle, high], 1))


class Head(nn.Module):
    """The head's layer over whole texts; names are those of the stored tensors."""

    def __init__(self, width: int, heads: int, inner: int, vocab: int, theta: float) -> None:
        super().__init__()
        self.heads, self.theta = heads, theta
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)
        layer = {
            "input_layernorm": nn.RMSNorm(width, 1e-6), "hidden_norm": nn.RMSNorm(width, 1e-6),
            "post_attention_layernorm": nn.RMSNorm(width, 1e-6),
            "self_attn": nn.ModuleDict({f"{n}_proj": nn.Linear(2 * width, width, bias=False) for n in "qkv"}),
            "mlp": nn.ModuleDict({f"{n}_proj": nn.Linear(width, inner, bias=False) for n in ("gate", "up")}),
        }  # fmt: skip
        layer["self_attn"]["o_proj"] = nn.Linear(width, width, bias=False)  # type: ignore[operator]
        layer["mlp"]["down_proj"] = nn.Linear(inner, width, bias=False)  # type: ignore[operator]
        self.midlayer = nn.ModuleDict(layer)
        self.norm = nn.RMSNorm(width, 1e-6)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def keys(self, embedded: Tensor, hidden: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [texts, heads, n, d]; ``place``: [n]."""
        layer: Any = self.midlayer
        x = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)], -1)
        q, k, v = (
            layer["self_attn"][f"{n}_proj"](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in "qkv"
        )  # fmt: skip
        d = q.shape[-1]
        angle = place[:, None] * self.theta ** (-torch.arange(0, d, 2) / d)[None]
        cos, sin = (torch.cat([f(angle), f(angle)], 1) for f in (torch.cos, torch.sin))

        def turned(t: Tensor) -> Tensor:
            return t * cos + torch.cat([-t[..., d // 2 :], t[..., : d // 2]], -1) * sin

        return turned(q), turned(k), v

    def finish(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, stream) after attention."""
        layer: Any = self.midlayer
        x = hidden + layer["self_attn"]["o_proj"](attended.transpose(1, 2).flatten(2))
        y = layer["post_attention_layernorm"](x)
        gate = functional.silu(layer["mlp"]["gate_proj"](y)) * layer["mlp"]["up_proj"](y)
        stream = x + layer["mlp"]["down_proj"](gate)
        return self.lm_head(self.norm(stream)), stream

    def losses(self, states: Tensor, ids: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        """Mean loss of the drafts of ``STEPS`` places; ids [texts, n] follow the tokens of ``states``.

        Draft j of a token attends to what was read before it, and to the drafts before it, as when it serves.
        """
        n = ids.shape[1]
        hidden, total = self.fc(states), torch.zeros(())
        read = torch.ones(n, n, dtype=torch.bool).tril()
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(STEPS):
            place = torch.arange(n) + step
            following = functional.pad(ids[:, step:], (0, step))
            q, k, v = self.keys(table[following], hidden, place)
            kept.append((k, v))
            scores = q @ kept[0][0].transpose(-1, -2)
            scores = scores.masked_fill(~read, float("-inf"))
            own = [(q * keys).sum(-1, keepdim=True) for keys, _ in kept[1:]]
            share = (torch.cat([scores, *own], -1) * q.shape[-1] ** -0.5).softmax(-1)
            attended = share[..., :n] @ kept[0][1]
            for at, (_, values) in enumerate(kept[1:]):
                attended = attended + share[..., n + at : n + at + 1] * values
            logits, hidden = self.finish(hidden, attended)
            wanted = functional.pad(ids[:, step + 1 :], (0, step + 1))
            counted = functional.pad(mask[:, step + 1 :], (0, step + 1))
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            total = total + (loss * counted.flatten()).sum() / counted.sum().clamp_min(1) * 0.8**step
        return total


def chats_of(found: list[Item]) -> list[list[dict[str, Any]]]:
    """Questions as chats, one wording each."""

    def content(item: Item, at: int) -> list[dict[str, Any]]:
        shown = [{"type": "image", "image": Image.fromarray(np.asarray(one.pixels))} for one in item.images]
        return [*shown, {"type": "text", "text": item.wordings[at % len(item.wordings)]}]

    return [[{"role": "user", "content": content(item, at)}] for at, item in enumerate(found)]


def record(count: int) -> tuple[list[tuple[Tensor, Tensor, int]], Tensor, dict[str, Any]]:
    """(states, ids that follow, first answer) of ``count`` questions, the model's table, and its sizes."""
    llm = LLM(str(demo_path()), speculation=False, enable_prefix_caching=False, **FLAGS)
    rank: Any = llm.engine.executor._rank  # type: ignore[attr-defined]
    text = rank.model.config.text
    rank.model.tap(TAPS, keep_side_by_side)
    rank.model.persistent.states = torch.zeros(len(rank.model.persistent.hidden), len(TAPS) * text.hidden)
    rank.eagle = recorder = Recorder(llm)
    outputs = llm.chat(chats_of(items(count, "head")), SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    lengths = sorted((len(o.prompt_token_ids or ()), len(o.outputs[0].token_ids)) for o in outputs)
    print(f"{count} questions, longest prompt {lengths[-1][0]} tokens", flush=True)
    found = []
    for output, key in zip(outputs, sorted(recorder.ids), strict=True):
        ids = torch.tensor(recorder.ids[key])
        found.append((torch.cat(recorder.states[key])[: len(ids)], ids, len(output.prompt_token_ids or ()) - 1))
    p, none = rank.model.persistent, torch.zeros(text.vocab, dtype=torch.int32)
    table = rank.model.embedding(torch.arange(text.vocab, dtype=torch.int32), none, p.state.last, none, p.arena).clone()
    sizes = {"hidden": text.hidden, "heads": text.heads, "inner": text.intermediate, "vocab": text.vocab}
    llm.close()
    return found, table, sizes


def batch_of(texts: list[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(states, ids, mask) of the ends of some texts, padded; the mask has their answers."""
    n = min(max(len(ids) for _, ids, _ in texts), LENGTH)
    states, ids, mask = torch.zeros(len(texts), n, texts[0][0].shape[1]), torch.zeros(len(texts), n).long(), None
    mask = torch.zeros(len(texts), n)
    for row, (own, following, first) in enumerate(texts):
        cut = max(len(following) - n, 0)
        size = len(following) - cut
        states[row, :size], ids[row, :size] = own[cut:], following[cut:]
        mask[row, max(first - cut, 0) : size] = 1
    return states, ids, mask


def train(args: argparse.Namespace) -> None:
    """Records, trains and writes the head."""
    torch.manual_seed(1)
    begun = time.monotonic()
    texts, table, sizes = record(args.questions)
    theta = 10000.0
    head = Head(sizes["hidden"], sizes["heads"], 2 * sizes["inner"], sizes["vocab"], theta)
    head.lm_head.weight.data.copy_(table)
    optimiser = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=0.01)
    step = 0
    while (gone := time.monotonic() - begun) < 60 * args.minutes:
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20) * max(1 - gone / (60 * args.minutes), 0.02)
        picked = [texts[i] for i in torch.randint(len(texts), (BATCH,)).tolist()]
        loss = head.losses(*batch_of(picked), table)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 25 == 0:
            print(f"{gone:.0f} s, step {step}: loss {loss.item():.3f}", flush=True)
    write(head, args.out, sizes, theta)


def write(head: Head, folder: Path, sizes: dict[str, Any], theta: float) -> None:
    """Writes the head in the hub's layout; it shares the model's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(held, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"], "num_key_value_heads": sizes["heads"],
        "intermediate_size": 2 * sizes["inner"], "vocab_size": sizes["vocab"], "draft_vocab_size": sizes["vocab"],
        "rms_norm_eps": 1e-6, "rope_theta": theta, "num_hidden_layers": 1, "max_position_embeddings": 32768,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def measure(folder: Path, count: int) -> float:
    """Mean tokens of a verified step over held-out questions."""
    asked = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 4}
    llm = LLM(str(demo_path()), speculative_config=asked, spec_always=True, **FLAGS)
    llm.chat(chats_of(items(count)), SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    totals = llm.engine.scheduler.totals
    llm.close()
    return 1 + totals.spec_accepted / max(totals.spec_drafts, 1)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall time of recording and training")
    parser.add_argument("--questions", type=int, default=400, help="questions whose answers it learns")
    parser.add_argument("--only-measure", action="store_true", help="measure a head that exists")
    args = parser.parse_args()
    if not args.only_measure:
        train(args)
    print(f"{measure(args.out, 60):.2f} tokens a verified step")


if __name__ == "__main__":
    main()
