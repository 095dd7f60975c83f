"""Mixtures of experts on the CPU: a gpt-oss of 20B's layer sizes in bfloat16 and with MXFP4 experts, in one process.

python -m benchmarks.experts [--rounds 5] [--layers 3] [--experts 8] [--threads N] [--smoke]

Decoding of one row: milliseconds a token, as a multiple of the time in which the bytes that a token needs (weights, and
of the experts those that it takes) are read at the rate that is measured between the rounds; bar 1.3. The sides take
turns, and their tokens a second are compared by pairs; bar 1.6.

Layers have fewer experts than 20B's 32, which changes no token's work: more of them than the caches hold. The
vocabulary is as much smaller than 20B's as there are fewer layers, so that the head has its share of a token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness.checkpoints import DEMO
from benchmarks.harness.reporting import Others, machine, median, table
from benchmarks.recurrent import Side, decode
from trencadis import LLM
from trencadis.core.cpu_affinity import available_cpus

BARS = {"decode": 1.3, "MXFP4": 1.6}
CHOSEN, BLOCK = 4, 32
"""Experts of a token; values of a block of MXFP4."""
LAYERS = 24
SIZES: dict[str, int] = {"hidden": 2880, "inner": 2880, "heads": 64, "groups": 8, "head_dim": 64, "vocab": 201088}
SMALL: dict[str, int] = {"hidden": 64, "inner": 64, "heads": 4, "groups": 2, "head_dim": 16, "vocab": 512}
QUANTISED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
MEMORY = 256 << 20
"""Bytes that are read to measure the rate."""


def write(folder: Path, sizes: dict[str, int], layers: int, experts: int, coded: bool) -> tuple[Path, int]:
    """Writes a random gpt-oss; returns its folder and the bytes of the weights that a token reads."""
    hidden, inner, wide = sizes["hidden"], sizes["inner"], sizes["heads"] * sizes["head_dim"]
    path, held = folder / ("MXFP4" if coded else "bfloat16"), dict[str, torch.Tensor]()
    narrow = sizes["groups"] * sizes["head_dim"]
    path.mkdir()
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)

    for i in range(layers):
        name = f"model.layers.{i}"
        for part, rows, columns in (("q", wide, hidden), ("k", narrow, hidden), ("v", narrow, hidden),
                                    ("o", hidden, wide)):  # fmt: skip
            held[f"{name}.self_attn.{part}_proj.weight"] = draw(rows, columns)
            held[f"{name}.self_attn.{part}_proj.bias"] = draw(rows)
        held[f"{name}.self_attn.sinks"] = draw(sizes["heads"])
        held[f"{name}.mlp.router.weight"], held[f"{name}.mlp.router.bias"] = draw(experts, hidden), draw(experts)
        for part, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            at = f"{name}.mlp.experts.{part}"
            held[f"{at}_bias"] = draw(experts, rows)
            if coded:
                shape = experts, rows, columns // BLOCK
                held[f"{at}_blocks"] = torch.randint(0, 256, (*shape, BLOCK // 2), dtype=torch.uint8)
                held[f"{at}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
            else:
                held[at] = draw(experts, columns, rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            held[f"{name}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    active = sum(t.nbytes * CHOSEN // experts if ".experts." in n else t.nbytes for n, t in held.items())
    held["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    held["model.embed_tokens.weight"], held["lm_head.weight"] = (
        draw(sizes["vocab"], hidden),
        draw(sizes["vocab"], hidden),
    )
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["groups"], "head_dim": sizes["head_dim"], "vocab_size": sizes["vocab"],
        "num_local_experts": experts, "num_experts_per_tok": CHOSEN, "sliding_window": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "attention_bias": True, "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
        **({"quantization_config": QUANTISED} if coded else {}),
    }))  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, path / file)
    return path, active + held["lm_head.weight"].nbytes


def load(folder: Path, sizes: dict[str, int], layers: int, experts: int, coded: bool, threads: int) -> Side:
    """Writes a model and loads it."""
    path, active = write(folder, sizes, layers, experts, coded)
    llm = LLM(
        str(path), dtype="bfloat16", threads=threads, max_model_len=2048, enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20, max_num_seqs=8, speculation=False,
    )  # fmt: skip
    shutil.rmtree(path)
    return Side(llm, active, 0)


def main() -> None:
    """Prints medians of both models, and the ratio of their tokens a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="small sizes: that it runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes, out = (SMALL, 8) if args.smoke else (SIZES | {"vocab": SIZES["vocab"] * args.layers // LAYERS}, 32)
    memory, others, found = torch.ones(MEMORY // 4), Others(), dict[str, list[tuple[float, float]]]()
    sides = dict[str, Side]()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bfloat16", "MXFP4"):
            sides[name] = load(Path(folder), sizes, args.layers, args.experts, name == "MXFP4", args.threads)
    for number in range(args.rounds + 1):
        for name, side in [*sides.items()][:: 1 if number % 2 else -1]:
            made = decode(side, out, number, memory)
            if number:  # the first round warms up
                found.setdefault(name, []).append(made)
    for side in sides.values():
        side.llm.close()
    print(machine())
    rows: list[Any] = [
        (name, f"{side.weights / 1e6:.0f}", *(f"{form(median(one[i] for one in found[name])):.2f}" for i, form in
         ((0, lambda s: 1000 * s), (1, float))))
        for name, side in sides.items()
    ]  # fmt: skip
    print(table(("experts", "MB a token", "ms a token", f"of memory (bar {BARS['decode']})"), rows))
    pairs = sorted(a[0] / b[0] for a, b in zip(found["bfloat16"], found["MXFP4"], strict=True))
    print(
        f"MXFP4 over bfloat16, tokens/s: {median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f}), bar {BARS['MXFP4']}"
    )
    print(f"others took {others.cores():.2f} cores")


if __name__ == "__main__":
    main()
