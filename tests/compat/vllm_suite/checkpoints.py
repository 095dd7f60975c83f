"""Makes small checkpoints in place of the models that vLLM's tests name, which nothing here can download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.fakes.adapters import adapter_of
from tests.fakes.checkpoints import classifier
from tests.families.pooled.encoders import encoder
from tests.families.pooled.models import qwen3_reranker, reward_checkpoint
from tests.families.pooled.pooled_case import sentence_files
from trencadis.assets import demo_path

KINDS = {
    "e5-small": "embed", "MiniLM-L12": "embed", "bge-base": "wide embed", "arctic-embed": "wide embed",
    "bge-reranker": "cross", "ms-marco": "cross", "apeach": "classify", "internlm2-1_8b-reward": "reward",
    "Qwen3-Reranker": "rerank", "-lora": "adapter", "-LoRA": "adapter", "/LoRA-": "adapter",
    "self_cognition": "adapter",
}  # fmt: skip
"""Part of a model's name -> kind; every other model is the demo, which chats and sees."""
ADAPTER_SIZE = 0.001
"""So small that the demo answers with an adapter as it does without."""


def make_checkpoints(folder: Path) -> dict[str, str]:
    """Returns kind -> folder of its checkpoint, and writes that to ``models.json``."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "models.json"
    if not listed.exists() or json.loads(listed.read_text())["names"] != KINDS:
        shutil.rmtree(folder)
        folder.mkdir()
        long: dict[str, Any] = {"max_position_embeddings": 514}
        demo = folder / "demo"
        shutil.copytree(demo_path(), demo, dirs_exist_ok=True)
        made = {
            "demo": demo,
            "embed": _make_encoder(folder / "embed", 384),
            "wide embed": _make_encoder(folder / "wide embed", 768),
            "cross": encoder(folder / "cross", "XLMRobertaForSequenceClassification", num_labels=1, **long),
            "classify": classifier(folder / "classify", labels=2),
            "reward": reward_checkpoint(folder / "reward", 1),
            "rerank": qwen3_reranker(folder / "rerank"),
            "adapter": _make_adapter(demo, folder / "adapter"),
        }
        listed.write_text(json.dumps({"kinds": {k: str(v) for k, v in made.items()}, "names": KINDS}))
    found: dict[str, str] = json.loads(listed.read_text())["kinds"]
    return found


def _make_encoder(folder: Path, width: int) -> Path:
    """Makes an encoder whose vectors have ``width`` numbers, as those of the model that it stands for."""
    made = encoder(folder, "BertModel", max_position_embeddings=512, hidden_size=width, num_attention_heads=12)
    return sentence_files(made, "cls_token")


def _make_adapter(demo: Path, folder: Path) -> Path:
    """Makes an adapter of the demo with its tokenizer, which some adapters of the hub have beside them."""
    adapter_of(demo, folder, size=ADAPTER_SIZE)
    for one in demo.glob("*token*"):
        shutil.copy(one, folder)
    return folder
