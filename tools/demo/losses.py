"""What training minimises: the answers, and labels of single cells that make the tower useful early."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .model import DemoModel
from .packing import Batch
from .palette import COLOURS
from .scene import SHAPES


def label_ids(tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """The tokens that stand for what a cell shows (ground, shapes, digits, photo) and for its colour."""
    words = [" background", *(f" {s}" for s in SHAPES), *"0123456789", " photo"]
    out = []
    for group in (words, [f" {name}" for name in COLOURS]):
        pieces = [tokenizer.encode(word).ids for word in group]
        if any(len(p) != 1 for p in pieces):
            raise RuntimeError("every label must be one token")
        out.append(torch.tensor([p[0] for p in pieces]))
    return out[0], out[1]


def cells(model: DemoModel, features: Tensor, what: Tensor, colour: Tensor, centre: Tensor, grid: tuple[int, int],
          labels: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Cell features scored against the word embeddings, and the way to the centre of the thing in the cell."""
    x = F.normalize(features.flatten(0, 1).float(), dim=-1)
    total = x.new_zeros(())
    notes: dict[str, float] = {}
    for i, (target, ids) in enumerate(((what, labels[0]), (colour, labels[1]))):
        words = F.normalize(model.embed[ids].float(), dim=-1)
        flat = target.flatten()
        scores = x @ words.T * model.aux_scale[i].float() * 4
        total = total + F.cross_entropy(scores, flat, ignore_index=-1)
        known = flat > (0 if i == 0 else -1)
        notes[("what", "colour")[i]] = (
            float((scores.argmax(-1) == flat)[known].float().mean()) if bool(known.any()) else 0.0
        )
    h, w = grid
    there = ~torch.isnan(centre[..., 0])
    if bool(there.any()):
        row, col = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        here = torch.stack([col.flatten() + 0.5, row.flatten() + 0.5], -1)
        offset = centre * torch.tensor([w, h]) - here
        guess = model.aux_centre(features).float()
        total = total + F.smooth_l1_loss(guess[there], offset[there], beta=0.3)
    return total, notes


def places(model: DemoModel, features: Tensor, centre: Tensor, grid: tuple[int, int]) -> Tensor:
    """Row and column of the cell and centre of the thing in it, as fractions of the picture.

    Only the tower sees the whole picture at once: a decoder token knows nothing of the cells after it.
    """
    h, w = grid
    guess = model.aux_place(features).float()
    row, col = torch.meshgrid((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing="ij")
    here = torch.stack([row.flatten(), col.flatten()], -1).expand(len(features), -1, -1)
    total = F.smooth_l1_loss(guess[..., :2], here, beta=0.03)
    there = ~torch.isnan(centre[..., 0])
    if bool(there.any()):
        total = total + F.smooth_l1_loss(guess[there][:, 2:], centre[there], beta=0.03)
    return total


def joint(
    model: DemoModel, batch: Batch, labels: tuple[Tensor, Tensor], weight: float
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the answers plus the auxiliary losses times `weight`."""
    dtype = model.embed.dtype
    assert batch.patches is not None
    features = model.vision(batch.patches.to(dtype), batch.grid)
    hidden = model.text(batch.ids, features, batch.positions, batch.mask.to(dtype))
    scores = model.logits(hidden.flatten(0, 1)[batch.sources]).float()
    each = F.cross_entropy(scores, batch.targets, reduction="none")
    # a long caption counts more than a yes, but not by its length
    weights = torch.bincount(batch.groups).float()[batch.groups].rsqrt()
    loss = (each * weights).sum() / weights.sum()
    notes = {"loss": float(each.detach().mean())}
    wrong = (scores.detach().argmax(-1) != batch.targets).float()
    exact = torch.zeros(len(batch.tags)).scatter_reduce(0, batch.groups, wrong, "amax") == 0
    for tag in set(batch.tags):
        picked = [i for i, t in enumerate(batch.tags) if t == tag]
        notes[f"exact/{tag}"] = float(exact[picked].float().mean())
    if weight > 0:
        extra, more = cells(model, features, batch.what, batch.colour, batch.centre, batch.grid, labels)
        loss = loss + weight * (extra + 5 * places(model, features, batch.centre, batch.grid))
        notes |= more
    return loss, notes
