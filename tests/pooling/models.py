"""Small random checkpoints of the models that pool, and what transformers makes of a prompt with each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.fakes.checkpoints import bare, classifier, randomise, text_settings, write_tokenizer
from tests.pooling.oracle import Float64

STEP = 77
"""Stands for the token that ends a step; the published id lies beyond the small vocabulary."""

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


def words_of(path: Path, ids: Sequence[int]) -> Float64:
    """Probabilities of the tokens 1 and 2 against each other, as the next token."""
    with torch.inference_mode():
        found = loaded("AutoModelForCausalLM", path)(input_ids=torch.tensor([ids])).logits[0, -1]
    return np.asarray(found[[ord("a") - 33 + 0, ord("b") - 33]].double().softmax(-1))


def qwen3_embedding(folder: Path) -> Path:
    """Named for a causal model, stored without its prefix and head, Matryoshka by a flag."""
    bare(folder, family="Qwen3", head_dim=16, tie_word_embeddings=True)
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**held, "architectures": ["Qwen3ForCausalLM"]}))
    return sentence_files(folder, "lasttoken")


def qwen3_reranker(folder: Path) -> Path:
    import transformers

    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text_settings(head_dim=16)))
    randomise(model, 5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


class RewardModel(torch.nn.Module):
    """What the repositories' own code computes: two linears with a ReLU between them, over every token."""

    def __init__(self, labels: int) -> None:
        import transformers

        super().__init__()
        self.config = transformers.Qwen2Config(**text_settings())
        self.model = transformers.Qwen2Model(self.config)
        hidden = self.config.hidden_size
        self.score = torch.nn.Sequential(
            torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, labels)
        )
        randomise(self, 7)

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        rows: torch.Tensor = self.score(self.model(input_ids=torch.tensor([ids])).last_hidden_state[0])
        return rows


@cache
def reward_model(labels: int) -> RewardModel:
    return RewardModel(labels).eval()


def reward_checkpoint(folder: Path, labels: int) -> Path:
    model = reward_model(labels)
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    name = "Qwen2ForRewardModel" if labels == 1 else "Qwen2ForProcessRewardModel"
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "architectures": [name]}))
    write_tokenizer(folder)
    return folder


def rewards_of(path: Path, ids: Sequence[int]) -> Float64:
    with torch.inference_mode():
        return np.asarray(reward_model(1)(ids).double())


def steps_of(path: Path, ids: Sequence[int]) -> Float64:
    with torch.inference_mode():
        return np.asarray(reward_model(2)(ids).double().softmax(-1))[np.asarray(ids) == STEP]


MODELS: dict[str, PoolingModel] = {
    "e5-mistral": PoolingModel(
        lambda f: sentence_files(bare(f, family="Mistral", sliding_window=None), "lasttoken"), last_of
    ),
    "Qwen3-Embedding": PoolingModel(qwen3_embedding, last_of),
    "Qwen3-Reranker": PoolingModel(
        qwen3_reranker,
        words_of,
        {
            "hf_overrides": {
                "architectures": ["Qwen3ForSequenceClassification"],
                "classifier_from_token": ["a", "b"],
                "is_original_qwen3_reranker": True,
            }
        },
    ),
    "Qwen3-Reranker, converted": PoolingModel(
        lambda f: classifier(f, family="Qwen3", labels=1, head_dim=16), scores_of
    ),
    "Qwen2 classification": PoolingModel(lambda f: classifier(f, labels=3), classes_of),
    "Qwen2.5-Math-RM": PoolingModel(lambda f: reward_checkpoint(f, 1), rewards_of),
    "Qwen2.5-Math-PRM": PoolingModel(
        lambda f: reward_checkpoint(f, 2), steps_of, {"pooler_config": {"step_tag_id": STEP}}
    ),
}
