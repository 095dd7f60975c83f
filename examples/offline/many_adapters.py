"""Requests of two LoRA adapters and of the base model in one engine, which is stepped by hand.

``python many_adapters.py MODEL ADAPTER ADAPTER``; without arguments the bundled demo answers with two random adapters.
It uses names alone that vLLM has as well: a program of vLLM's for several adapters runs with ``trencadis`` in place of
``vllm`` in its import.
"""

from __future__ import annotations

import sys
import tempfile

from trencadis import EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams

PROMPTS = ("The image shows a red circle and", "A robot may not injure a human being")


def make_requests(adapters: tuple[str, ...]) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    """Returns each prompt for the base model and for each adapter."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    loras = [LoRARequest(f"lora-{i}", i, path) for i, path in enumerate(adapters, 1)]
    return [(prompt, greedy, lora) for prompt in PROMPTS for lora in (None, *loras)]


def process_requests(
    engine: LLMEngine, requests: list[tuple[str, SamplingParams, LoRARequest | None]]
) -> dict[str, RequestOutput]:
    """Adds one request before each step, and steps until all have their answers."""
    number, done, waiting = 0, dict[str, RequestOutput](), [*requests]
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params, lora = waiting.pop(0)
            engine.add_request(str(number), prompt, params, lora_request=lora)
            number += 1
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def main(model: str = "", *adapters: str) -> list[str]:
    """Prints each answer with the name of its adapter; returns the answers in the order of the requests."""
    with tempfile.TemporaryDirectory() as folder:
        if not adapters:
            adapters = tuple(write_demo_adapters(folder))
        # One adapter at a time is on the device: requests of the other one wait until no request uses it.
        engine = LLMEngine.from_engine_args(EngineArgs(
            model=model, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256,
            max_model_len=1024,
        ))  # fmt: skip
        requests = make_requests(adapters)
        found = process_requests(engine, requests)
        engine.close()
    texts = [found[str(i)].outputs[0].text for i in range(len(requests))]
    for (_, _, lora), text in zip(requests, texts, strict=True):
        print(f"{lora.lora_name if lora else 'base':8} {text!r}")
    return texts


def write_demo_adapters(folder: str) -> list[str]:
    """Writes two random adapters of the bundled demo, as peft's ``save_pretrained`` lays them out."""
    import json
    from pathlib import Path

    import torch
    from safetensors.torch import load_file, save_file

    from trencadis.assets import demo_path

    weights = load_file(next(demo_path().glob("*.safetensors")))
    found = []
    for number in (1, 2):
        generator, tensors = torch.Generator().manual_seed(number), dict[str, torch.Tensor]()
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "v_proj.weight")) and "visual" not in name:
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = torch.randn((8, weight.shape[1]), generator=generator) * 0.2
                tensors[f"{module}.lora_B.weight"] = torch.randn((weight.shape[0], 8), generator=generator) * 0.2
        path = Path(folder, str(number))
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        (path / "adapter_config.json").write_text(json.dumps(config))
        found.append(str(path))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
