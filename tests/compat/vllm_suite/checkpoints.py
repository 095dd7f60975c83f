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
from trencadis.assets import demo_path

KINDS = {
    "e5-small": "embed", "bge-base": "embed", "MiniLM-L12": "embed", "arctic-embed": "embed",
    "bge-reranker": "cross", "ms-marco": "cross", "apeach": "classify", "internlm2-1_8b-reward": "reward",
    "Qwen3-Reranker": "rerank", "-lora": "adapter", "-LoRA": "adapter", "self_cognition": "adapter",
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
        long: dict[str, Any] = {"max_position_embeddings": 514}
        demo = folder / "demo"
        shutil.copytree(demo_path(), demo, dirs_exist_ok=True)
        made = {
            "demo": demo,
            "embed": encoder(folder / "embed", "BertModel", max_position_embeddings=512),
            "cross": encoder(folder / "cross", "XLMRobertaForSequenceClassification", num_labels=1, **long),
            "classify": classifier(folder / "classify", labels=2),
            "reward": reward_checkpoint(folder / "reward", 1),
            "rerank": qwen3_reranker(folder / "rerank"),
            "adapter": adapter_of(demo, folder / "adapter", size=ADAPTER_SIZE),
        }
        listed.write_text(json.dumps({"kinds": {k: str(v) for k, v in made.items()}, "names": KINDS}))
    found: dict[str, str] = json.loads(listed.read_text())["kinds"]
    return found
