"""Recorded layers of small decode launches: bits are those of single calls, and what cannot be replayed is not."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import kernel_kinds
from tests.fakes import checkpoints
from tests.fakes.adapters import adapter_of
from tests.families.text_checkpoints import family_checkpoint
from trencadis import LLM, LoRARequest, SamplingParams
from trencadis.backends.cpu.attention_plan import CpuAttn
from trencadis.backends.cpu.native import kernel_choice_by_cpu, kernel_threads
from trencadis.backends.cpu.native.ctypes_structs import ReplayedCall
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.recorded_layers import MOST_ROWS, ComputingOps, RecordedLayers, ReusedMemory, decodes_few

pytestmark = pytest.mark.skipif(not kernel_kinds.DENSE, reason="the kernels of the CPU are not built")

WIDE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                        "intermediate_size": 128}  # fmt: skip
Answer = tuple[list[int], list[float]]
Make = Callable[..., LLM]


records = pytest.mark.skipif(
    not kernel_choice_by_cpu.chosen_table().number, reason="launches of torch's kernels are not recorded"
)


@pytest.fixture
def make() -> Iterator[Make]:
    """``make(checkpoint, **flags)``: an engine in bfloat16, which is closed after the test."""
    made: list[LLM] = []

    def start(checkpoint: Path, **flags: Any) -> LLM:
        options = {
            "dtype": "bfloat16",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "speculation": False,
            "enable_prefix_caching": False,
            **flags,
        }
        made.append(LLM(str(checkpoint), kv_cache_memory_bytes=8 << 20, **options))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def ops_of(llm: LLM) -> CpuOps:
    ops = llm.engine.executor._rank.backend.ops  # type: ignore[attr-defined]
    assert isinstance(ops, CpuOps)
    return ops


def groups_of(llm: LLM) -> list[RecordedLayers]:
    return [one for _, some in ops_of(llm).recorded.values() for one in some if isinstance(one, RecordedLayers)]


def answer(llm: LLM, rows: int, seed: int = 0) -> list[Answer]:
    """Answers of different lengths, which grow over several blocks, so that rows leave one after another."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 200, int(rng.integers(3, 40))).tolist() for _ in range(rows)]
    params = [SamplingParams(temperature=0, max_tokens=12 + 9 * i, logprobs=1, ignore_eos=True) for i in range(rows)]
    outs = [made.outputs[0] for made in llm.generate(prompts, params, use_tqdm=False)]
    values = [[one[i].logprob for one, i in zip(out.logprobs or [], out.token_ids, strict=True)] for out in outs]
    return [(list(out.token_ids), some) for out, some in zip(outs, values, strict=True)]


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {}, "float32": {"dtype": "float32"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    "threads": {"threads": 2},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@records
def test_replayed_launches_have_the_same_bits(form: str, make: Make, tmp_path: Path) -> None:
    checkpoint = checkpoints.qwen2(tmp_path / "c", dtype=torch.bfloat16, **WIDE)
    llm = make(checkpoint, **FORMS[form])
    ops_of(llm).records = False
    plain = [answer(llm, rows, rows) for rows in (1, 2, 5)]
    assert not groups_of(llm)
    ops_of(llm).records = True
    assert [answer(llm, rows, rows) for rows in (1, 2, 5)] == plain
    (group,) = groups_of(llm)
    assert group.replays > 40
    assert [answer(llm, rows, rows) for rows in (1, 2, 5)] == plain, "after other launches"


def answer_adapted(llm: LLM, own: list[LoRARequest | None]) -> list[Answer]:
    """Answers to prompts of which each has its own adapter, or none; rows leave one after another."""
    prompts = [[3 + i, 40, 7 * i + 5] for i in range(len(own))]
    params = [SamplingParams(temperature=0, max_tokens=8 + 5 * i, logprobs=1, ignore_eos=True) for i in range(len(own))]
    outs = [made.outputs[0] for made in llm.generate(prompts, params, use_tqdm=False, lora_request=own)]
    values = [[one[i].logprob for one, i in zip(out.logprobs or [], out.token_ids, strict=True)] for out in outs]
    return [(list(out.token_ids), some) for out, some in zip(outs, values, strict=True)]


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8", "threads"])
@records
def test_replayed_launches_with_adapters_have_the_same_bits(form: str, make: Make, tmp_path: Path) -> None:
    """The rows of a recording have other adapters, in other slots, each time; three adapters share two slots."""
    checkpoint = checkpoints.qwen2(tmp_path / "c", dtype=torch.bfloat16, **WIDE)
    a, b, c = (LoRARequest(n, 1, str(adapter_of(checkpoint, tmp_path / n, seed=i))) for i, n in enumerate("abc"))
    llm = make(checkpoint, enable_lora=True, max_loras=2, max_cpu_loras=3, max_lora_rank=8, **FORMS[form])
    mixes: list[list[LoRARequest | None]] = [[a], [a, b, None], [None, b, b], [c, c, a], [b, None, c], [None] * 3]
    ops_of(llm).records = False
    plain = [answer_adapted(llm, own) for own in mixes]
    assert len({str(one) for one in plain[1:]}) == len(mixes) - 1, "adapters change answers"
    ops_of(llm).records = True
    for again in range(3):
        assert [answer_adapted(llm, own) for own in mixes] == plain, again
    (group,) = groups_of(llm)
    held = {key for key, made in group._known.items() if made is not None}
    assert {adapted for *_, adapted in held} == {False, True}
    adapted_rows = {n for n, _, adapted in held if adapted}
    assert adapted_rows == {1, 2, 3}
    replays = group.replays
    answer_adapted(llm, [c, b, c])
    assert group.replays - replays >= 10, "launches with adapters are replayed"


@records
def test_norms_of_queries_and_keys_are_recorded(make: Make, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**checkpoints.text_settings(**WIDE)))
    llm = make(checkpoints._write(model, tmp_path / "c", 0, torch.bfloat16))
    found = [answer(llm, rows, rows) for rows in (1, 3)]
    (group,) = groups_of(llm)
    assert group.replays > 20
    ops_of(llm).records = False
    assert [answer(llm, rows, rows) for rows in (1, 3)] == found


@records
def test_experts_of_gpt_oss_are_recorded(make: Make, tmp_path: Path) -> None:
    """With sinks, biases and windows in every second layer; another dtype's experts are torch's, call by call."""
    (tmp_path / "c").mkdir()
    form = "windows of 20 in every second layer"
    path = family_checkpoint(tmp_path / "c", family="gpt_oss", form=form, **WIDE)
    llm = make(path)
    found = [answer(llm, rows, rows) for rows in (1, 3)]
    assert groups_of(llm) and all(group.replays > 20 for group in groups_of(llm))
    ops_of(llm).records = False
    assert [answer(llm, rows, rows) for rows in (1, 3)] == found
    llm = make(path, dtype="float32")
    answer(llm, 1)
    assert not any(group.replays for group in groups_of(llm))


@pytest.mark.parametrize("form", ["bfloat16", "int8", "threads"])
@records
def test_recurrent_layers_are_recorded_between_those_with_attention(form: str, make: Make, tmp_path: Path) -> None:
    """Rows leave and come, so that a row of a recording has other states each time."""
    sizes: dict[str, Any] = dict(
        linear_key_head_dim=16, linear_value_head_dim=16, num_hidden_layers=6, layer_types=None
    )
    sizes["layer_types"] = [*["linear_attention"] * 3, "full_attention", *["linear_attention"] * 2]
    family_checkpoint(tmp_path / "c", family="qwen3_5", form="one layer of four attends", **sizes)
    llm = make(tmp_path / "c", **FORMS[form])
    ops_of(llm).records = False
    plain = [answer(llm, rows, rows) for rows in (1, 2, 5)]
    ops_of(llm).records = True
    for again in range(2):
        assert [answer(llm, rows, rows) for rows in (1, 2, 5)] == plain, again
    groups = groups_of(llm)
    assert [group.recurrent for group in groups] == [True, False, True]
    assert min(group.replays for group in groups) > 60


def test_a_recording_does_not_import_the_compiler() -> None:
    """The import takes a second, in which a request would wait."""
    code = """
        import sys, torch
        from trencadis.backends.cpu.recorded_layers import ComputingOps, ReusedMemory
        with ComputingOps(ReusedMemory()) as mode:
            torch.ones(3) + 1
        assert mode.found
        print("torch._dynamo" in sys.modules)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 40])
def test_gates_of_heads_that_lie_apart(width: int, dtype: torch.dtype) -> None:
    """Within a rounding of the gate and one of the result; a gate of any size is finite."""
    ops, generator = CpuOps(), torch.Generator().manual_seed(width)
    wide = 4 * torch.randn((5, 3, 2, width), generator=generator).to(dtype)
    wide[0, 0, 1, :2] = torch.tensor([-60000.0, 60000.0])
    x = torch.randn((5, 3, width), generator=generator).to(dtype)
    _, gate = wide.unbind(2)
    made = ops.gate_heads(x, gate)
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    torch.testing.assert_close(made.double(), x.double() * gate.double().sigmoid(), rtol=2 * step, atol=1e-6)
    assert torch.equal(ops.gate_heads(x[1:2], gate[1:2]), made[1:2]), "a row depends on itself alone"


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 3, 70])
def test_norms_of_heads_that_lie_apart(n: int, weight: torch.dtype) -> None:
    """The bits are those of a copy's rows."""
    ops, generator = CpuOps(), torch.Generator().manual_seed(n)
    wide = torch.randn((n, 7 * 40), generator=generator).to(torch.bfloat16)
    own = (1 + torch.randn(40, generator=generator)).to(weight)
    heads = wide[:, 80:200].view(n, 3, 40)
    want = ops.rms_norm(heads.reshape(-1, 40), own, 1e-6)[0].view(heads.shape)
    assert torch.equal(ops.norm_heads(heads, own, 1e-6), want)
    assert torch.equal(
        ops.norm_heads(heads.float(), own.float(), 1e-6),
        ops.rms_norm(heads.float().reshape(-1, 40), own.float(), 1e-6)[0].view(heads.shape),
    )


@records
def test_windows_that_differ_by_layer(make: Make, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    settings = checkpoints.text_settings(
        **WIDE, num_hidden_layers=3, use_sliding_window=True, sliding_window=20, max_window_layers=1, layer_types=kinds
    )
    model = Qwen2ForCausalLM(Qwen2Config(**settings))
    llm = make(checkpoints._write(model, tmp_path / "c", 0, torch.bfloat16))
    found = answer(llm, 3)
    (group,) = groups_of(llm)
    assert group.replays
    ops_of(llm).records = False
    assert answer(llm, 3) == found


@pytest.mark.parametrize(
    "flags",
    [{"dtype": "float16"}, {"kv_cache_dtype": "int8"}, {"batch_invariant": True}],
    ids=["torch's products", "codes of keys", "batch-invariant"],
)
def test_what_torch_computes_is_not_recorded(flags: dict[str, Any], make: Make, tmp_path: Path) -> None:
    llm = make(checkpoints.qwen2(tmp_path / "c", dtype=torch.bfloat16, **WIDE), **flags)
    found = answer(llm, 2)
    (group,) = groups_of(llm)
    assert not group.replays
    ops_of(llm).records = False
    assert answer(llm, 2) == found


@records
def test_layers_that_are_bound_to_another_cache_are_recorded_again(make: Make, tmp_path: Path) -> None:
    """The calls hold the addresses of the cache, which would be another tensor's by then."""
    llm = make(checkpoints.qwen2(tmp_path / "c", dtype=torch.bfloat16, **WIDE))
    found = answer(llm, 2)
    (group,) = groups_of(llm)
    for layer in group._layers:
        old = layer.attention.kv
        layer.attention.kv = old._replace(k=torch.zeros_like(old.k), v=torch.zeros_like(old.v))
        old.k.fill_(float("nan"))
    replays = group.replays
    assert answer(llm, 2) == found and group.replays > replays


def test_eager_engines_record_nothing(make: Make, tmp_path: Path) -> None:
    llm = make(checkpoints.qwen2(tmp_path / "c", dtype=torch.bfloat16, **WIDE), enforce_eager=True)
    answer(llm, 1)
    assert not ops_of(llm).records and not groups_of(llm)


@records
def test_memory_is_that_of_one_layer(make: Make, tmp_path: Path) -> None:
    sizes = list[int]()
    for layers in (2, 6):
        folder = tmp_path / str(layers)
        llm = make(checkpoints.qwen2(folder, dtype=torch.bfloat16, **{**WIDE, "num_hidden_layers": layers}))
        answer(llm, 1)
        (group,) = groups_of(llm)
        (held,) = [one for one in group._known.values() if one is not None]
        sizes.append(held.nbytes)
    assert sizes[0] == sizes[1] > 0


def test_memory_is_given_again_only_when_nobody_holds_it() -> None:
    memory = ReusedMemory()
    first = memory.give(torch.empty(4, 8))
    second, view = memory.give(torch.empty(8, 4)), first[1]
    place = first.data_ptr()
    assert second.data_ptr() != place and second.shape == (8, 4)
    del first
    gc.collect()
    assert memory.give(torch.empty(32)).data_ptr() != place, "a view holds it"
    del view
    assert memory.give(torch.empty(32)).data_ptr() == place
    assert memory.give(torch.empty(32, dtype=torch.int32)).data_ptr() != place


def test_a_product_of_torch_with_a_packed_weight_is_seen() -> None:
    """Its weight has no storage to compare."""
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(8, 8))
    with ComputingOps(ReusedMemory()) as computing, torch.inference_mode():
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 8), packed, None, "none", [], "")
    assert computing.found
    with ComputingOps(ReusedMemory()) as computing, torch.inference_mode():
        torch.ones(2, 8)
    assert computing.found
    x = torch.ones(2, 8)
    with ComputingOps(ReusedMemory()) as computing, torch.inference_mode():
        x.view(4, 4)[1].t().split(2)
    assert not computing.found


def attn_of(starts: list[int], tokens: int) -> CpuAttn:
    rows = len(starts) - 1
    numbers = torch.zeros(rows, dtype=torch.int32)
    made = CpuAttn(torch.tensor(starts, dtype=torch.int32), numbers, numbers[:, None], torch.zeros(tokens))
    made.block_size, made.plans = 16, {}
    return made


def test_which_launches_are_recorded() -> None:
    assert decodes_few(attn_of([0, 1, 2, 2], 2))
    assert not decodes_few(attn_of([0, 1, 1, 2], 2)), "padding"
    assert not decodes_few(attn_of([0, 2, 3, 3], 3)), "a row of several tokens"
    most = MOST_ROWS + 1
    assert not decodes_few(attn_of([*range(most + 1), most], most))


def test_an_unknown_call_ends_a_replay() -> None:
    calls = (ReplayedCall * 2)(ReplayedCall(function=99), ReplayedCall(function=0))
    assert kernel_threads.calls().replay(ctypes.addressof(calls), 2, None, 1) == 1
