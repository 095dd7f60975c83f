"""Random checkpoints with recurrent layers, and plain ones of about the same size, in the hub's layout.

python -m benchmarks.harness.recurrent_checkpoints [qwen35 qwen3] [--to FOLDER]

qwen35: text of Qwen3.5-0.8B's sizes in bfloat16 (1.5 GB), which vLLM serves as well; qwen3: a Qwen3 of as many
parameters. Both are written once, to ``.bench/checkpoints``, with a tokenizer and a chat template.

transformers makes the values, so that gates and decays are those that training begins with; norms are drawn.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.checkpoints import HALF, SPECIALS, make_folder, write_tokenizer
from benchmarks.harness.reporting import BENCH

VOCABULARY = 248_320
TOKENIZER = replace(HALF, name="qwen35", base=VOCABULARY - 256, vocab=VOCABULARY)
"""Qwen3.5's number of ids, of which those above the added tokens have no text."""
TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=1024,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
    bos_token_id=TOKENIZER.base,
    eos_token_id=TOKENIZER.base + SPECIALS.index("<|im_end|>"),
)
RECURRENT: dict[str, Any] = TEXT | dict(
    num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, head_dim=256, intermediate_size=3584,
    linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
PLAIN: dict[str, Any] = TEXT | dict(
    num_hidden_layers=31, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072,
)  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {"qwen35": ("Qwen3_5", RECURRENT), "qwen3": ("Qwen3", PLAIN)}
"""Name of a checkpoint -> its family's prefix among transformers' classes, and its sizes."""


def write_model(folder: Path, family: str, sizes: dict[str, Any], dtype: str = "bfloat16") -> Path:
    """Writes config.json and random weights of ``{family}ForCausalLM`` of transformers; returns the folder."""
    import transformers

    text = "Text" if family == "Qwen3_5" else ""
    config = getattr(transformers, f"{family}{text}Config")(**sizes, dtype=dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() == 1 and name.endswith("norm.weight"):
                values.add_(0.1 * torch.randn(values.shape))
    end = sizes["eos_token_id"]
    model.generation_config = transformers.GenerationConfig(eos_token_id=end, pad_token_id=0, do_sample=False)
    model.save_pretrained(folder)
    return folder


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights of a checkpoint of one file, in which a tied head is held once."""
    with (folder / "model.safetensors").open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        held = json.loads(file.read(header))
    spans = [entry["data_offsets"] for name, entry in held.items() if name != "__metadata__"]
    return sum(stop - start for start, stop in spans)


def state_bytes(folder: Path) -> int:
    """Bytes of float32 states that a sequence of gated DeltaNet holds."""
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("layer_types", []).count("linear_attention")
    width = config.get("linear_num_value_heads", 0) * config.get("linear_key_head_dim", 0)
    return int(4 * layers * width * config.get("linear_value_head_dim", 0))


def checkpoint(name: str, root: Path | None = None) -> Path:
    """Returns the folder of checkpoint ``name``, which is made if missing."""

    def write(work: Path) -> None:
        write_model(work, *SHAPES[name])
        write_tokenizer(work, TOKENIZER)
        (work / "preprocessor_config.json").unlink()

    return make_folder((root or BENCH / "checkpoints") / name, write)


def main() -> None:
    """Writes the checkpoints that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["qwen35"], choices=SHAPES)
    parser.add_argument("--to", type=Path, help="folder of checkpoints")
    args = parser.parse_args()
    for name in args.names:
        print(checkpoint(name, args.to))


if __name__ == "__main__":
    main()
