"""What tables of pooling models share: how one is made, and what transformers makes of a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.pooling.oracle import Float64

Values = Callable[[Path, Sequence[int]], Float64]


@dataclass(frozen=True)
class PoolingModel:
    """How a checkpoint is made, the flags that it is served with, and transformers' values of a prompt.

    ``wants``: [width], or [tokens, width] where every token is pooled.
    """

    make: Callable[[Path], Path]
    wants: Values
    flags: dict[str, Any] = field(default_factory=dict)


def sentence_files(folder: Path, mode: str, normalize: bool = True) -> Path:
    """The files of sentence-transformers: the rows that are taken, and whether vectors have length 1."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{n}" if i else "", "type": f"sentence_transformers.models.{n}"}
        for i, n in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return folder


@cache
def loaded(kind: str, path: Path) -> Any:
    """A model of transformers in float32."""
    import transformers

    return getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()


def last_of(path: Path, ids: Sequence[int]) -> Float64:
    """The last token's hidden row, of length 1."""
    with torch.inference_mode():
        row = loaded("AutoModel", path)(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].double()
    return np.asarray(row / row.norm())


def scores_of(path: Path, ids: Sequence[int]) -> Float64:
    """The class head's probability of the pair: a sigmoid."""
    with torch.inference_mode():
        found = loaded("AutoModelForSequenceClassification", path)(input_ids=torch.tensor([ids])).logits[0]
    return np.asarray(found.double().sigmoid())


def classes_of(path: Path, ids: Sequence[int]) -> Float64:
    with torch.inference_mode():
        found = loaded("AutoModelForSequenceClassification", path)(input_ids=torch.tensor([ids])).logits[0]
    return np.asarray(found.double().softmax(-1))
