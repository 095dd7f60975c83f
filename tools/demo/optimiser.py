"""Muon for the matrices, AdamW for the rest, over one flat buffer that processes share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]
    splits: tuple[int, ...]  # rows of the matrices that lie in one parameter; empty for AdamW
    scale: float  # of the learning rate

    @property
    def size(self) -> int:
        """Number of values."""
        out = 1
        for n in self.shape:
            out *= n
        return out

    def view(self, flat: Tensor) -> Tensor:
        """This parameter inside a flat buffer."""
        return flat[self.start : self.start + self.size].view(self.shape)


def slots(model: nn.Module) -> list[Slot]:
    """The layout of the flat buffer, a function of the model alone."""
    out, start = [], 0
    for name, p in model.named_parameters():
        rows = p.shape[0]
        splits: tuple[int, ...] = ()
        scale = 1.0
        if p.ndim == 2 and "embed" not in name and "aux" not in name and "patch" not in name:
            splits = (rows,)
            if "vision" in name and "qkv" in name:
                splits = (rows // 3,) * 3
            elif "qkv" in name:
                splits = (rows // 2, rows // 4, rows // 4)
            elif "gate_up" in name:
                splits = (rows // 2,) * 2
        elif "patch" in name:
            scale = 0.2
        out.append(Slot(name, start, tuple(p.shape), splits, scale))
        start += p.numel()
    return out


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, for a stack of equal matrices [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2).contiguous()
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x


class Optimiser:
    """Updates the share of one process; state lies in flat buffers like the parameters."""

    def __init__(self, layout: list[Slot], flat: Tensor, first: Tensor, second: Tensor, rank: int, world: int) -> None:
        self.flat, self.first, self.second = flat, first, second
        matrices = [s for s in layout if s.splits]
        # deal out the matrices so that each process gets like numbers of every shape
        ordered = sorted(matrices, key=lambda s: (s.shape, s.name))
        self.matrices = ordered[rank::world]
        self.others = [s for s in layout if not s.splits][rank::world]

    def step(self, grads: list[Tensor], muon: float, adam: float, vision: float, count: int,
             vision_only: bool = False) -> None:  # fmt: skip
        """One update from the sum of the processes' gradients; `vision` scales the tower's rates."""
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor, float]]] = {}
        for slot in self.matrices:
            if vision_only and slot.name.startswith("layers"):
                continue
            g = slot.view(grads[0]).clone()
            for other in grads[1:]:
                g += slot.view(other)
            g /= len(grads)
            momentum = slot.view(self.first)
            momentum.lerp_(g, 0.05)
            g.lerp_(momentum, 0.95)
            rate = muon * (vision if slot.name.startswith("vision") else 1.0) * slot.scale
            for part, p in zip(g.split(slot.splits), slot.view(self.flat).split(slot.splits), strict=True):
                groups.setdefault((part.shape[0], part.shape[1]), []).append((part, p, rate))
        for (rows, cols), members in groups.items():
            updates = orthogonalise(torch.stack([m[0] for m in members])).float()
            for update, (_, p, rate) in zip(updates, members, strict=True):
                p.mul_(1 - 0.05 * rate)
                p.add_(update, alpha=-rate * max(1.0, rows / cols) ** 0.5)
        b1, b2 = 0.9, 0.98
        for slot in self.others:
            if vision_only and slot.name.startswith("layers"):
                continue
            g = sum((slot.view(x) for x in grads[1:]), slot.view(grads[0]).clone()) / len(grads)
            m, v, p = slot.view(self.first), slot.view(self.second), slot.view(self.flat)
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            rate = adam * (vision if slot.name.startswith("vision") else 1.0) * slot.scale
            update = (m / (1 - b1**count)) / ((v / (1 - b2**count)).sqrt() + 1e-8)
            p.add_(update, alpha=-rate)
