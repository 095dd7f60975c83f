"""gpt-oss with MXFP4 experts: values are those of transformers, and a file that was cut short is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.test_quantised_experts import assert_ranks_share_codes, prompt_values
from tests.families.test_same_tokens import close
from tests.families.text_checkpoints import family_checkpoint, set_keys
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.errors import StartupError

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}


def encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 of float32 [experts, out, in]: blocks uint8 [..., in / 32, 16] and scales uint8 [..., in / 32]."""
    groups = rows.view(*rows.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(1e-30))) - 2
    units = groups / torch.exp2(exponent)[..., None]
    codes = (units.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (units < 0)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks, (exponent + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the checkpoint with codes, the same with their values in float32)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = family_checkpoint(
        tmp_path_factory.mktemp("plain"), family="gpt_oss", form="windows of 20 in every second layer",
        intermediate_size=96, num_local_experts=4,
    )  # fmt: skip
    coded = Path(shutil.copytree(plain, tmp_path_factory.mktemp("coded") / "gpt_oss"))
    held = load_file(plain / "model.safetensors")
    quantised = dict(held)
    for name in [n for n in held if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = encode(held[name].float().transpose(1, 2))
        del quantised[name]
        quantised |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        held[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(held, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised, coded / "model.safetensors", metadata={"format": "pt"})
    set_keys(coded, quantization_config=CONFIG)
    return coded, plain


def logits(path: Path, ops: str) -> torch.Tensor:
    ids = np.random.default_rng(0).integers(0, 300, 60).tolist()
    return HandDrivenModel(path, "padded", ops).prefill(ids, 60)


def test_values_are_those_of_transformers_bit_for_bit(folders: tuple[Path, Path], oracle: Any) -> None:
    coded, plain = folders
    assert load_config(coded).quant is not None
    got, want = logits(coded, "reference"), logits(plain, "reference")
    assert torch.equal(got, want), "codes become the same float32 values"
    ids = np.random.default_rng(0).integers(0, 300, 60).tolist()
    with torch.no_grad():
        close(got, oracle(plain)(input_ids=torch.tensor([ids])).logits[0])


def test_codes_on_the_cpu_are_close(folders: tuple[Path, Path]) -> None:
    """Own kernels round activations to 8 bits, as they do for every weight that they keep as codes; that may change
    the experts of a token where two scores are close.
    """
    coded, plain = folders
    got, want = logits(coded, "fast"), logits(plain, "fast")
    off = (got - want).norm(dim=1) / want.norm(dim=1)
    assert off.median() < 0.02 and (off > 0.1).float().mean() < 0.1


def test_a_card_answers_as_transformers_and_keeps_codes(
    folders: tuple[Path, Path], oracle: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On CUDA's twin: greedy tokens, and log-probabilities of prompts, those of the values of the codes."""
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    coded, plain = folders
    assert_ranks_share_codes(coded)
    got, want = (prompt_values(str(path), "cuda") for path in folders)
    assert np.abs(got - want).max() <= 1e-4 * want.std()
    prompts = [[5 * n + i % 7 for i in range(3, 17 + n)] for n in range(4)]
    llm = LLM(str(coded), device="cuda", dtype="float32", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=16,
              block_size=16, num_gpu_blocks_override=16, warmup="skip")  # fmt: skip
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    made = llm.generate(asked, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    llm.close()
    model = oracle(plain)
    for ids, one in zip(prompts, made, strict=True):
        for token in one.outputs[0].token_ids:
            with torch.no_grad():
                assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids = [*ids, token]


@pytest.mark.parametrize(
    ("part", "how", "said"),
    [
        ("blocks", "cut", "has shape"),
        ("scales", "cut", "has shape"),
        ("scales", "gone", "lacks layers"),
        ("scales", "nan", "has a scale of NaN"),
    ],
)
def test_a_file_that_was_cut_short_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, part: str, how: str, said: str
) -> None:
    path = Path(shutil.copytree(folders[0], tmp_path / "gpt_oss"))
    held = load_file(path / "model.safetensors")
    name = next(n for n in held if n.endswith(f"down_proj_{part}"))
    if how == "gone":
        del held[name]
    else:
        held[name] = held[name][:, :-1].contiguous() if how == "cut" else torch.full_like(held[name], 255)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=said):
        logits(path, "reference")


def test_other_modules_in_mxfp4_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(folders[0], tmp_path / "gpt_oss"))
    set_keys(path, quantization_config={**CONFIG, "modules_to_not_convert": ["model.layers.0.mlp.experts"]})
    with pytest.raises(StartupError, match="modules_to_not_convert"):
        load_config(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gpt_oss"
