"""Small random checkpoints of the models that pool, and what transformers makes of a prompt with each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.fakes.checkpoints import bare, classifier, randomise, text_settings, write_tokenizer
from tests.families.pooled.encoders import ENCODERS
from tests.families.pooled.pooled_case import PoolingModel, classes_of, last_of, loaded, scores_of, sentence_files
from tests.pooling.oracle import Float64

STEP = 77
"""Stands for the token that ends a step; the published id lies beyond the small vocabulary."""


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
    **ENCODERS,
}
