"""The training losses: of answers, and of labels of single cells, which make the tower useful early."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo import config as c
from demo.images.palette import COLOURS
from demo.images.scene import SHAPES
from demo.language import tokenizer
from demo.model import DemoModel
from demo.packing import Batch


def label_ids(words: Tokenizer) -> tuple[Tensor, Tensor]:
    """The tokens that stand for what a cell shows (ground, shapes, digits, photo) and for its colour."""
    kinds = [" background", *(f" {s}" for s in SHAPES), *"0123456789", " photo"]
    out = []
    for group in (kinds, [f" {name}" for name in COLOURS]):
        pieces = [words.encode(word).ids for word in group]
        if any(len(p) != 1 for p in pieces):
            raise RuntimeError("every label must be one token")
        out.append(torch.tensor([p[0] for p in pieces]))
    return out[0], out[1]


def cells(model: DemoModel, features: Tensor, what: Tensor, colour: Tensor, centre: Tensor, grid: tuple[int, int],
          labels: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Scores of cell features against the word embeddings, and the offset to the centre of the thing in the cell."""
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
    """Row and column of the cell and centre of the thing in it, as fractions of the image.

    Only the tower sees the whole image at once: a decoder token knows nothing of the cells after it.
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


@lru_cache(maxsize=1)
def named_classes() -> tuple[Tensor, Tensor]:
    """For every token the shape class (1..8) that it names, else 0, and the colour index, else -1."""
    words = tokenizer.build()
    shapes = torch.zeros(c.VOCAB, dtype=torch.long)
    colours = torch.full((c.VOCAB,), -1)
    for i, name in enumerate(SHAPES):
        for text in (f" {name}", f" {name}s", f" {name}es"):
            ids = words.encode(text).ids
            if len(ids) == 1:
                shapes[ids[0]] = i + 1
    for i, name in enumerate(COLOURS):
        colours[words.encode(f" {name}").ids[0]] = i
    return shapes, colours


def _question_mask(batch: Batch) -> Tensor:
    """Which tokens are words of questions for a shape or a colour, [rows, length]."""
    shapes, colours = named_classes()
    asked = (shapes[batch.ids] > 0) | (colours[batch.ids] >= 0)
    asked.view(-1)[batch.sources + 1] = False  # answers do not count
    return asked


def recalls(scores: Tensor, batch: Batch, near: int = 17) -> Tensor:
    """Rewards an answer's first word for attending to its question's words: minus the log of that attention."""
    length = batch.ids.shape[1]
    begins = torch.cat([torch.ones(1, dtype=torch.bool), batch.groups[1:] != batch.groups[:-1]])
    r, p = batch.sources[begins] // length, batch.sources[begins] % length
    back = p[:, None] - torch.arange(length)
    right = _question_mask(batch)[r] & (back > 0) & (back < near) & (batch.mask[r, 0, 0, p] == 0)
    keep = right.any(1)
    if not bool(keep.any()):
        return scores.new_zeros((), dtype=torch.float32)
    look = scores[r[keep], p[keep]].float()
    return (look.logsumexp(1) - look.masked_fill(~right[keep], -1e4).logsumexp(1)).mean()


def mentions(
    model: DemoModel, watch: list[Tensor], batch: Batch, labels: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Trains a question's word for a shape or a colour to attend to the cells that show it and to know what they hold.

    Returns minus the log of that attention, and the loss of naming the shape, the colour and the place of the thing,
    where only one thing fits the word.
    """
    shapes, colours = named_classes()
    rows, length = batch.ids.shape
    at = (batch.ids == c.IDS["<|image_pad|>"]).nonzero()[:, 1].view(rows, -1)  # places of the cells
    asked = _question_mask(batch)
    asked &= batch.mask[:, 0, 0].gather(2, at[:, None, -1:].expand(-1, length, 1))[..., 0] == 0  # the image is seen
    r, p = asked.nonzero().unbind(1)
    word = batch.ids[r, p]
    what, colour = batch.what.view(rows, -1)[r], batch.colour.view(rows, -1)[r]
    right = (what == shapes[word][:, None]) & (shapes[word] > 0)[:, None]
    right |= (colour == colours[word][:, None]) & (what > 0) & (colours[word] >= 0)[:, None]
    keep = right.any(1)
    if not bool(keep.any()):
        nothing = watch[1].new_zeros((), dtype=torch.float32)
        return nothing, nothing
    r, p, right, what, colour = r[keep], p[keep], right[keep], what[keep], colour[keep]
    look = watch[0][r, 0, 0, p].float().gather(1, at[r])
    seen = (look.logsumexp(1) - look.masked_fill(~right, -1e4).logsumexp(1)).mean()
    first = right.float().argmax(1, keepdim=True)
    centres = batch.centre.view(rows, -1, 2)[r]
    centre = centres.gather(1, first[..., None].expand(-1, 1, 2))
    alone = (((centres - centre).abs().amax(-1) < 1e-3) | ~right).all(1)
    shape = what.gather(1, first)[:, 0]
    alone &= (shape > 0) & (shape <= len(SHAPES))
    if not bool(alone.any()):
        return seen, seen.new_zeros(())
    hidden = F.rms_norm(watch[1][r, p][alone].float(), (c.TEXT,))
    told = seen.new_zeros(())
    for i, target in enumerate((shape[alone], colour.gather(1, first)[alone, 0])):
        words = F.normalize(model.embed[labels[i]].float(), dim=-1)
        scores = F.normalize(hidden, dim=-1) @ words.T * model.aux_scale[i].float() * 4
        told = told + F.cross_entropy(scores, target, ignore_index=-1)
    guess = model.aux_place(hidden.to(model.embed.dtype)).float()[:, 2:]
    return seen, told + 5 * F.smooth_l1_loss(guess, centre[alone, 0], beta=0.03)


def joint(
    model: DemoModel, batch: Batch, labels: tuple[Tensor, Tensor], weight: float
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the answers plus the auxiliary losses times `weight`."""
    dtype = model.embed.dtype
    assert batch.patches is not None
    features = model.vision(batch.patches.to(dtype), batch.grid)
    watch: list[Tensor] = []
    hidden = model.text(batch.ids, features, batch.positions, batch.mask.to(dtype), watch)
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
        looking, told = mentions(model, watch, batch, labels)
        recall = recalls(watch[2][:, 1, 0], batch)
        loss = loss + 0.1 * (looking + told + recall)
        notes |= {
            **more,
            "looking": float(looking.detach()),
            "told": float(told.detach()),
            "recall": float(recall.detach()),
        }
    return loss, notes
