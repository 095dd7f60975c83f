"""Adapters beside quantised weights and experts, of pooling models, with sampling, forks and beams; memory on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import kernel_kinds
from tests.fakes import checkpoints
from tests.fakes.adapters import adapter_of
from tests.families.text_checkpoints import CASES, FORMS, family_checkpoint
from tests.lora.conftest import Adapter, Base
from tests.lora.test_devices import CARDS
from tests.lora.test_same_tokens import BASE, Merged, prompts, request_of
from trencadis import LLM, BeamSearchParams, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from trencadis.backends.cpu import int8_linear
from trencadis.backends.cpu.native import kernel_choice_by_cpu
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.family import MLPS, RECURRENT
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.lora.adapter_files import read_adapter
from trencadis.core.lora.adapter_store import load_matrices
from trencadis.core.memory.weight_bytes import AdapterSlotSizes, adapter_bytes
from trencadis.server.cli import main


def logprobs_of(llm: LLM, prompt: tuple[int, ...], adapter: Path | None) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (made,) = llm.generate([list(prompt)], params, use_tqdm=False, lora_request=request_of(adapter))
    assert made.prompt_logprobs is not None
    found = [next(iter(one.values())).logprob for one in made.prompt_logprobs if one is not None]
    return torch.tensor(found)


UNROUNDED = "cpu, 16 or 32 bits as they load"
"""A CPU with neither own kernels nor fbgemm, such as an ARM's."""

EXACT = [("emulated hpu", "int8"), ("emulated hpu", "int4"), ("cuda twin", "int4"), (UNROUNDED, "int8"),
         (UNROUNDED, "int4")]  # fmt: skip
"""Products by codes that leave activations as they are; other ones round them to 8 bits, one scale a token."""

ROUNDS = [("cpu", "int8"), ("cpu", "int4"), ("cuda twin", "int8")]


@pytest.mark.parametrize(("card", "bits"), EXACT + ROUNDS)
def test_beside_quantised_weights(
    base: Base, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, bits: str
) -> None:
    """The sum is that of the dequantised base and B A: within 1e-2 where products leave activations as they are.

    Elsewhere the base alone is off by more than that, and the adapter adds at most as much again: its products are
    exact, but read hidden states that the base's layers have already moved.
    """
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if card == UNROUNDED:
        kernel_kinds.use(kernel_choice_by_cpu.TORCH, monkeypatch)
        monkeypatch.setattr(int8_linear, "is_available", lambda: False)
    checkpoint, prompt = base("llama"), prompts(3, 60)[2]
    one = adapter(checkpoint, seed=1)
    coded = tmp_path / bits
    assert main.main(["quantize", str(checkpoint), str(coded), "--to", bits]) == 0
    opened = dequantised(coded, checkpoint, tmp_path / "open")
    found = {}
    for name, path, flags in (("coded", coded, CARDS.get(card, {})), ("open", opened, {})):
        llm = LLM(str(path), **{**BASE, **flags})
        found[name] = logprobs_of(llm, prompt, one), logprobs_of(llm, prompt, None)
        llm.close()
    assert (found["coded"][0] - found["coded"][1]).abs().max() > 0.5, "the adapter changes the answers"
    with_adapter, alone = (float((a - b).abs().max()) for a, b in zip(found["coded"], found["open"], strict=True))
    print(f"{card}, {bits}: {with_adapter:.2g} with the adapter, {alone:.2g} without")
    if (card, bits) in EXACT:
        assert with_adapter < 1e-2
    else:
        assert with_adapter < 2 * alone < 0.2


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_products_that_round_activations_do_not_round_those_of_adapters(
    base: Base, adapter: Adapter, tmp_path: Path, bits: str
) -> None:
    """On a CPU, matrix by matrix: what an adapter adds to the outputs is x A B, within 1e-2 of its size."""
    checkpoint = base("llama")
    one = adapter(checkpoint, seed=1)
    coded = tmp_path / bits
    assert main.main(["quantize", str(checkpoint), str(coded), "--to", bits]) == 0
    llm = LLM(str(coded), **{**BASE, "max_loras": 2})
    logprobs_of(llm, prompts(3, 60)[2], one)
    rank = llm.engine.executor._rank  # type: ignore[attr-defined]
    config, ops, store = load_config(coded), rank.backend.ops, rank.adapters
    matrices = load_matrices(read_adapter(one, config), config.text)
    rows = ops.prepare_adapters(torch.tensor([1, 0, 1, 1], dtype=torch.int32), store._numbers, torch.float32)
    for layer in store.layers:
        x = torch.randn((4, layer.inputs), generator=torch.Generator().manual_seed(1))
        made = layer.linear(x.clone(), rows) - layer.linear(x.clone())
        found = [matrices[part.name] for part in layer.parts]
        want = torch.cat([x @ a.t() @ b.t() for a, b in found], 1)
        assert float((made - want)[[0, 2, 3]].abs().max()) < 1e-2 * float(want.abs().max()), layer.parts
        assert not made[1].any()
    llm.close()


def dequantised(coded: Path, checkpoint: Path, out: Path) -> Path:
    """A checkpoint in float32 with the values of the codes."""
    import shutil

    from safetensors.torch import load_file, save_file

    from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
    from trencadis.core.checkpoint.model_registry import family_of
    from trencadis.core.checkpoint.weight_file_reader import open_weights
    from trencadis.core.device.backend import BackendConfig, load

    shutil.copytree(checkpoint, out)
    config = load_config(coded)
    source = CheckpointSource(
        open_weights(coded), family_of(config.architecture).names, load("cpu")(BackendConfig()), config
    )
    weights = load_file(out / "model.safetensors")
    for name, tensor in weights.items():
        module = name.removeprefix("model.").removesuffix(".weight")
        if "_proj" in module:
            found = source.take_quantised(module, (tensor.shape[0], tensor.shape[1]), 0, 0, tensor.shape[0])
            assert found is not None
            weights[name] = found.dequantised().float()
    save_file(weights, out / "model.safetensors")
    return out


def test_embeddings_and_classes(tmp_path: Path, merged: Merged) -> None:
    for number, checkpoint in enumerate((checkpoints.bare(tmp_path / "bare"), checkpoints.classifier(tmp_path / "c"))):
        one, flags = adapter_of(checkpoint, tmp_path / f"a{number}", seed=1), {**BASE, "runner": "pooling"}
        found = []
        for path, asked in ((checkpoint, one), (merged(checkpoint, one), None), (checkpoint, None)):
            llm = LLM(str(path), **flags)
            made = llm.encode([[5, 6, 7, 8, 9], [1, 2]], use_tqdm=False, lora_request=request_of(asked))
            found.append(np.array([np.asarray(m.outputs.data).ravel() for m in made]))
            llm.close()
        np.testing.assert_allclose(found[0], found[1], atol=2e-5)
        assert np.abs(found[0] - found[2]).max() > 1e-3


def test_attention_of_models_with_experts(tmp_path: Path, merged: Merged) -> None:
    checkpoint = family_checkpoint(tmp_path / "base", family="qwen3_moe", form="plain")
    one = adapter_of(checkpoint, tmp_path / "a", r".*self_attn\.\w_proj", seed=1)
    found = []
    for path, asked in ((checkpoint, one), (merged(checkpoint, one), None)):
        llm = LLM(str(path), **BASE)
        found.append(logprobs_of(llm, prompts(3, 50)[2], asked))
        llm.close()
    assert (found[0] - found[1]).abs().max() < 1e-4


ATTENTION_NAMES = r"self_attn\.(\w+_proj)|mixer\.[qkvo]_proj"
MLP_NAMES = r"mlp\.\w+_proj|feed_forward\.w[123]|shared_mlp\.\w+_linear|mixer\.(up|down)_proj"
MIXER_NAMES = r"(linear_attn|conv|mamba|mixer)\.(in|out)_proj\w*"
QUICK = ("qwen3_5", "lfm2", "granite_hybrid", "nemotron_h", "qwen3_next")
"""Families with recurrent layers, of whose forms ``make test`` runs the first."""


def adapted_names(config: ModelConfig) -> str:
    """Returns a pattern of the modules that take adapters, by the record of the model's family."""
    parts, text = family_of(config.architecture).adapters, config.text
    dense = MLPS in parts and any(text.has_mlp(i) for i in range(text.layers))
    names = [ATTENTION_NAMES, *([MLP_NAMES] if dense else []), *([MIXER_NAMES] if RECURRENT in parts else [])]
    return rf".*layers\.\d+\.({'|'.join(names)})"


@pytest.mark.parametrize(("family", "form"), [
    case if case[0] in QUICK and case[1] == next(iter(FORMS[case[0]])) else pytest.param(*case, marks=pytest.mark.long)
    for case in CASES if case[0] not in ("gpt2", "opt")
])  # fmt: skip
def test_every_text_family(tmp_path: Path, merged: Merged, family: str, form: str) -> None:
    """Adapters of the parts that the family's record names, which all text families have."""
    checkpoint = family_checkpoint(tmp_path / "base", family=family, form=form)
    config = load_config(checkpoint)
    one = adapter_of(checkpoint, tmp_path / "a", adapted_names(config), seed=1)
    recurrent = config.text.recurrent
    if recurrent is not None and not recurrent.interleaved:
        names = {name.split(".")[2] for name in read_adapter(one, config).modules}
        assert "linear_attn" in names and "self_attn" in names
    found = []
    for path, asked in ((checkpoint, one), (merged(checkpoint, one), None), (checkpoint, None)):
        llm = LLM(str(path), **BASE)
        found.append(logprobs_of(llm, prompts(3, 50)[2], asked))
        if asked is not None:
            layers = llm.engine.executor._rank.adapters.layers  # type: ignore[attr-defined]
            values = sum(len(one.parts) * one.inputs + sum(part.width for part in one.parts) for one in layers)
            assert adapter_bytes(config, 4, 1, AdapterSlotSizes(1, 16)) == 4 * (16 * values + 1)
            assert (found[0] - logprobs_of(llm, prompts(3, 50)[2], asked)).abs().max() < 1e-4, "from cached states"
        llm.close()
    assert (found[0] - found[1]).abs().max() < 1e-4
    assert (found[0] - found[2]).abs().max() > 1e-2, "the adapter changes the answers"


def test_choices_and_beams_share_their_adapter(base: Base, adapter: Adapter, merged: Merged) -> None:
    checkpoint = base("llama")
    one, prompt = adapter(checkpoint, seed=1), list(prompts(3, 40)[2])
    drawn = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    found: list[Any] = []
    for path, asked in ((checkpoint, one), (merged(checkpoint, one), None)):
        llm = LLM(str(path), **BASE)
        request = request_of(asked)
        (made,) = llm.generate([prompt], drawn, use_tqdm=False, lora_request=request)
        (searched,) = llm.beam_search([{"prompt_token_ids": prompt}], beams, lora_request=request)
        llm.engine.scheduler.check()
        found.append(([c.token_ids for c in made.outputs], [s.tokens for s in searched.sequences]))
        llm.close()
    assert found[0] == found[1]


def test_an_engine_is_stepped_by_hand(base: Base, adapter: Adapter) -> None:
    """As vLLM's example of many adapters does it: one slot, requests of two adapters and of the base in turn."""
    checkpoint = base("llama")
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(checkpoint), enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256,
            dtype="float32", max_model_len=384, kv_cache_memory_bytes=16 << 20,
        )
    )  # fmt: skip
    kinds = [None, *(LoRARequest(f"lora{i}", i, str(adapter(checkpoint, seed=i))) for i in (1, 2))]
    params, answers, waiting = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), {}, [*kinds, *kinds]
    count = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(str(count), "A robot may not", params, lora_request=waiting.pop(0))
            count += 1
        answers |= {made.request_id: made.outputs[0].token_ids for made in engine.step() if made.finished}
    engine.close()
    found = [tuple(answers[str(i)]) for i in range(6)]
    assert found[:3] == found[3:] and len(set(found)) == 3


def test_a_draft_model_drafts_as_the_base_and_the_adapter_verifies(base: Base, adapter: Adapter) -> None:
    checkpoint = base("llama")
    asked = [None, *(request_of(adapter(checkpoint, seed=seed)) for seed in (1, 2))] * 2
    params, found = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), []
    for drafts in ({}, {"speculative_config": {"model": str(checkpoint), "num_speculative_tokens": 2}}):
        llm = LLM(str(checkpoint), **{**BASE, "max_loras": 2, **drafts})
        made = llm.generate([list(p) for p in prompts(6, 40)], params, use_tqdm=False, lora_request=asked)
        found.append([one.outputs[0].token_ids for one in made])
        accepted = llm.engine.stats().spec_accepted
        llm.close()
    assert found[0] == found[1] and accepted > 0


def test_all_values_of_an_adapter_are_read(base: Base, tmp_path: Path) -> None:
    """16-bit files, and files whose tensors lie at odd places."""
    config = load_config(base("llama"))
    wide = adapter_of(base("llama"), tmp_path / "wide", seed=1)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = adapter_of(base("llama"), tmp_path / str(dtype), seed=1, dtype=dtype)
        for name, want in load_matrices(read_adapter(wide, config), config.text).items():
            got = load_matrices(read_adapter(narrow, config), config.text)[name]
            for a, b in zip(got, want, strict=True):
                assert torch.allclose(a, b.to(dtype).float(), atol=2e-2)


def test_the_plan_shows_the_slots(base: Base, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(base("llama")), "--device", "hpu", "--memory", "8GiB", "--max-model-len", "512"]
    assert main.main([*words, "--enable-lora", "--max-loras", "8", "--max-lora-rank", "64"]) == 0
    assert "adapters" in capsys.readouterr().out
    assert main.main(words) == 0
    assert "adapters" not in capsys.readouterr().out


PLACES: dict[str, dict[str, Any]] = {**CARDS, "two ranks": {"tensor_parallel_size": 2}}
STAGES = "two stages"
FORM_OF = {
    ("granite_hybrid", "two ranks"): "experts, two groups, rotary, biases",
    ("qwen3_5", STAGES): "tied, first and last attend, a head each",
}
"""Forms whose heads two ranks can share, and that have attention in both stages; elsewhere the first one."""
QUICK_PLACES = (("lfm2", "cuda twin"), ("nemotron_h", "emulated hpu"))


@pytest.mark.parametrize(("family", "place"), [
    (family, place) if (family, place) in QUICK_PLACES else pytest.param(family, place, marks=pytest.mark.long)
    for family, place in [*((family, place) for family in QUICK for place in PLACES), ("qwen3_5", STAGES)]
])  # fmt: skip
def test_recurrent_layers_on_every_device(
    tmp_path: Path, merged: Merged, monkeypatch: pytest.MonkeyPatch, family: str, place: str
) -> None:
    """An adapter, another one and the base in one batch, each of which goes on after its prompt."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if place == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    form = FORM_OF.get((family, place)) or next(iter(FORMS[family]))
    checkpoint = family_checkpoint(tmp_path / "base", family=family, form=form)
    names = adapted_names(load_config(checkpoint))
    own = [adapter_of(checkpoint, tmp_path / str(seed), names, seed=seed, rank=4 * seed) for seed in (1, 2)]
    prompt = {"prompt_token_ids": list(prompts(3, 50)[2])}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)

    def answers(path: Path, asked: list[Path | None], **flags: Any) -> list[tuple[list[int], list[float]]]:
        llm = LLM(str(path), **{**BASE, "max_loras": 2, **flags})
        made = llm.generate([prompt] * len(asked), params, use_tqdm=False, lora_request=[*map(request_of, asked)])
        llm.engine.scheduler.check()
        llm.close()
        outs = [one.outputs[0] for one in made]
        return [([*o.token_ids], [next(iter(v.values())).logprob for v in o.logprobs or []]) for o in outs]

    found = answers(checkpoint, [own[0], None, own[1], own[0]], **PLACES.get(place, {"pipeline_parallel_size": 2}))
    wants = [answers(path, [None])[0] for path in (merged(checkpoint, own[0]), checkpoint, merged(checkpoint, own[1]))]
    for (tokens, values), (want, scores) in zip(found, [*wants, wants[0]], strict=True):
        assert tokens == want and np.allclose(values, scores, atol=1e-3)
    assert len({tuple(tokens) for tokens, _ in found}) == 3
