"""``--attention-backend``: the library serves a whole engine on the twin, or one line says why not."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tests.fakes.attention import flash, flashinfer
from tests.fakes.command_line import from_command_line
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cuda import make_backend, shape_policy
from trencadis.backends.cuda.attention_libraries import attention_library_selector
from trencadis.backends.cuda.attention_libraries.library_attention import FlashInferLaunch, FlashInferWorkspaces
from trencadis.backends.cuda.attention_libraries.ops_with_attention_library import (
    OURS,
    AttentionLibraryAdapter,
    prompts_note,
    with_library,
)
from trencadis.backends.cuda.attention_libraries.startup_comparison import find_disagreement
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.shape_policy import SERVING
from trencadis.core.buckets import Bucket, Stage, verify_variant
from trencadis.core.device.backend import BackendConfig
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.errors import StartupError
from trencadis.core.memory.launch_memory import attending

SETTINGS: dict[str, Any] = {
    "device": "cuda", "policy": "twin", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 3,
    "max_num_batched_tokens": 32, "num_gpu_blocks_override": 40, "limit_mm_per_prompt": {"image": 0, "video": 0},
}  # fmt: skip
PROMPTS = ["one two three four five six seven " * 3, "Write a word", "a b c d e f g h i j"]
KINDS = {
    "flash2": ("FLASH_ATTN", 256), "flash3": ("FLASH_ATTN", 16), "torch": ("FLASH_ATTN", 256),
    "flashinfer": ("FLASHINFER", 16), "flash3 unasked": ("", 16),
}  # fmt: skip


def installed(kind: str, patch: pytest.MonkeyPatch) -> str:
    """The flag of a library that is there now."""
    if kind == "flashinfer":
        flashinfer.install(patch)
    elif kind == "torch":
        flash.install_torch(patch)
    else:
        flash.install(patch, int(kind[5]))
        patch.setattr(attention_library_selector, "HOPPER", 0 if kind == "flash2" else 90)
    return KINDS[kind][0]


def answers(
    block: int, monkeypatch: pytest.MonkeyPatch, folder: Path, **more: Any
) -> tuple[list[Any], tuple[str, ...]]:
    """Tokens of prompts that run together, and what was said at the start."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(folder))
    with_graphs = LLM(str(demo_path()), block_size=block, **{**SETTINGS, **more})
    outs = with_graphs.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    notes = with_graphs.engine.executor._rank.backend.notes  # type: ignore[attr-defined]
    with_graphs.close()
    return [o.outputs[0].token_ids for o in outs], notes


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_answers_as_without_the_library(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Chunks, mixed launches and decoding by graphs; stand-ins compute as the twin does, so that answers are equal."""
    block = KINDS[kind][1]
    want, plain = answers(block, monkeypatch, tmp_path)
    found, notes = answers(block, monkeypatch, tmp_path, attention_backend=installed(kind, monkeypatch))
    assert found == want
    said = [n for n in notes if n.startswith("attention of ")]
    assert len(said) == 1 and KINDS[kind][0] in said[0] and OURS not in said
    assert [n for n in plain if "attention" in n] == [OURS]
    assert kind != "flashinfer" or (flashinfer.Wrapper.plans > 10 and flashinfer.Wrapper.blocking == 0)


def config(name: str, **more: Any) -> BackendConfig:
    given: dict[str, Any] = {
        "dtype": torch.bfloat16, "heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 256,
        "options": {"policy": "twin", "attention": name}, **more,
    }  # fmt: skip
    return BackendConfig(**given)


def refusal(name: str, **more: Any) -> str:
    with pytest.raises(StartupError) as caught:
        make_backend(config(name, **more))
    return str(caught.value)


@pytest.mark.parametrize(("name", "module"), [("FLASH_ATTN", "flash_attn"), ("FLASHINFER", "flashinfer")])
def test_a_library_that_is_not_there_ends_the_start(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for third in shape_policy.FLASH_3:
        monkeypatch.setitem(sys.modules, third, None)
    said = refusal(name)
    remedy = attention_library_selector.REMEDIES[name]
    assert said == (
        f"--attention-backend {name}: {module} is not installed; {remedy}, or leave the flag out for this engine's own "
        "kernels"
    )


def test_a_library_that_does_not_serve_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old: Any = ModuleType("flashinfer")
    old.__version__, old.BatchPrefillWithPagedKVCacheWrapper = "0.1", type("Old", (), {"plan": lambda self: None})
    monkeypatch.setitem(sys.modules, "flashinfer", old)
    assert (
        "flashinfer 0.1 is too old: BatchPrefillWithPagedKVCacheWrapper lacks disable_split_kv; pip install"
        in refusal("FLASHINFER")
    )
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    said = refusal("FLASH_ATTN")
    assert "flash_attn cannot be imported (undefined symbol: _ZN3c10); reinstall it, or" in said and "\n" not in said
    monkeypatch.setattr(attention_library_selector, "HOPPER", 0)
    flash.install(monkeypatch, 2)
    assert refusal("FLASH_ATTN", block_size=16) == (
        "--attention-backend FLASH_ATTN: flash-attn 2.8.4 takes KV blocks of 256 slots, not 16; add --block-size 256, "
        "or leave the flag out for this engine's own kernels"
    )
    assert 256 in SERVING.block_sizes


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("FLASH_ATTN", {"dtype": torch.float32}, "it computes in bfloat16 and float16, not in float32"),
        ("FLASHINFER", {"head_dim": 80}, "it takes heads of 64, 128, 256 values, not of 80"),
        ("FLASHINFER", {"windows": (512,)}, "every layer of this model sees a window of keys"),
    ],
)
def test_a_model_that_the_library_does_not_take_has_our_kernels(
    name: str, more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer.install(monkeypatch)
    flash.install(monkeypatch, 2)
    backend: Any = make_backend(config(name, **more))
    assert backend.library is None and type(backend.ops).__name__ == "TwinOps"
    notes = [n for n in backend.notes if "attention" in n]
    assert len(notes) == 1 and notes[0].endswith(why) and "this engine's own kernels do" in notes[0]
    assert attention_library_selector.unsupported_reason(
        attention_library_selector.select_library("FLASH_ATTN", 80), config(name, batch_invariant=True)
    ).startswith("--batch-inv")


def test_layers_that_the_library_does_not_take_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A window, codes, spans: our attention, one line each."""
    flashinfer.install(monkeypatch)
    ops: Any = make_backend(config("FLASHINFER", windows=(0, 512))).ops  # type: ignore[attr-defined]
    ours: list[Any] = []
    parent = type(ops).__mro__[2]
    monkeypatch.setattr(parent, "attend", lambda *args: ours.append(args))

    class Launch:
        def attend(self, *args: Any) -> str:
            return "theirs"

    from trencadis.core.device.backend import Attn, LayerKV

    ops.launch, x = Launch(), torch.zeros(1)
    attn = Attn(x, x, x, x)
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        for _ in range(2):
            assert ops.attend(x, x, x, LayerKV(x, x), attn, 1.0) == "theirs"
            ops.attend(x, x, x, LayerKV(x, x), attn, 1.0, 512)
            ops.attend(x, x, x, LayerKV(x, x, x, x), attn, 1.0)
            ops.attend(x, x, x, LayerKV(x, x), attn._replace(upto=x), 1.0)
    assert len(ours) == 6
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        f"flashinfer 0.6.18 does not attend to {what}"
        for what in (
            "layers with a window of keys",
            "an 8-bit KV cache",
            "tokens that see keys after their own position",
        )
    ]


def wrong(call: Any, kind: str) -> Any:
    """``flash_attn_with_kvcache`` with a mistake."""

    def attend(q: torch.Tensor, k: Any, v: Any, **given: Any) -> torch.Tensor:
        if kind == "raises":
            raise RuntimeError("no kernel image is available\nmore")
        if kind == "pages":
            given["page_table"] = given["page_table"].flip(1)
        if kind == "causal":
            given["window_size"] = (3, 0)
        out: torch.Tensor = call(q, k, v, **given)
        if kind == "rows without keys":
            return torch.where(out == 0, float("nan"), out)
        return out * 1.1 if kind == "scale" else out

    return attend


@pytest.mark.parametrize("kind", ["", "raises", "pages", "causal", "rows without keys", "scale"])
@pytest.mark.parametrize("block", [16, 256])
def test_a_library_that_nobody_asked_for_is_compared_first(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3 attends to prompts on Hopper where it agrees with our kernels; else these do, and a line says
    why.
    """
    flash.install(monkeypatch, 3)
    module: Any = sys.modules["flash_attn_interface"]
    module.flash_attn_with_kvcache = wrong(module.flash_attn_with_kvcache, kind)
    backend: Any = make_backend(config("", block_size=block, max_blocks_per_row=2048 // block))
    notes = [n for n in backend.notes if n.startswith("attention of ")]
    if not kind:
        assert notes == [prompts_note(backend.ops.found)] and backend.library is not None
        sizes, body = backend.sizes, lambda inputs: inputs
        for bucket, theirs in (
            (Bucket(Stage.PREFILL, (64, 2)), True), (Bucket(Stage.DECODE, (64,)), False),
            (Bucket(Stage.VERIFY, (8,), verify_variant(4)), False), (Bucket(Stage.VISION, (64,)), False),
        ):  # fmt: skip
            wrapped = backend.library.wrap_body(InputBuffers(bucket, sizes, backend.runtime), body)
            assert (wrapped is not body) == theirs, bucket
        return
    assert backend.library is None and len(notes) == 1 and "\n" not in notes[0]
    assert notes[0].startswith(f"{OURS}, not flash-attn 3: ")
    assert ("no kernel image is available" if kind == "raises" else "its values differ by ") in notes[0]


def test_the_comparison_sees_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    flash.install(monkeypatch, 3)
    found = attention_library_selector.find_flash_3(90)
    backend: Any = make_backend(config("TRITON_ATTN", block_size=16, max_blocks_per_row=16, windows=(0, 512)))
    assert found is not None and find_disagreement(found, backend) == ""
    call = found.calls["attend"]
    found.calls["attend"] = lambda *args, **given: call(*args, **{**given, "window_size": (-1, -1)})
    assert "its values differ by" in find_disagreement(found, backend)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"options": {"policy": "twin", "attention": "TRITON_ATTN"}}, " (--attention-backend TRITON_ATTN)"),
        ({"dtype": torch.float32}, ", not flash-attn 3: it computes in bfloat16 and float16, not in float32"),
        ({"sinks": True}, ", not flash-attn 3: layers of this model have attention sinks"),
        ({"head_dim": 512}, ", not flash-attn 3: it takes heads of multiples of 8 up to 256 values, not of 512"),
    ],
)
def test_our_kernels_attend_where_they_are_asked_for_or_must(
    more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash.install(monkeypatch, 3)
    backend: Any = make_backend(config("", **more))
    assert backend.library is None and [n for n in backend.notes if n.startswith("attention")] == [OURS + why]


def test_torch_attends_where_no_package_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the version on whose ``varlen_attn`` takes pages; its blocks are those of version 2, of which it is a
    copy.
    """
    real = inspect.signature(varlen.varlen_attn)
    flash.install_torch(monkeypatch)
    assert [*inspect.signature(flash.varlen_attn).parameters] == [*real.parameters]
    assert refusal("FLASH_ATTN", block_size=32) == (
        f"--attention-backend FLASH_ATTN: varlen_attn of torch {torch.__version__} takes KV blocks of 256 slots, not "
        "32; add --block-size 256, or leave the flag out for this engine's own kernels"
    )
    backend: Any = make_backend(config("FLASH_ATTN"))
    assert backend.library is not None and "varlen_attn of torch" in backend.notes[-1]

    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", older)
    assert "flash_attn is not installed; pip install" in refusal("FLASH_ATTN")


@pytest.mark.parametrize("switch", ["1", "0"])
def test_launches_of_few_tokens_keep_their_six_launches(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library attends where layers run op by op: in prompts, in larger steps, and anywhere without the switch."""
    from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes

    monkeypatch.setenv("TRENCADIS_CUDA_WHOLE_LAYERS", switch)
    flash.install(monkeypatch, 3)
    monkeypatch.setattr(attention_library_selector, "HOPPER", 90)
    ops = with_library(CudaOps, attention_library_selector.select_library("FLASH_ATTN", 90))()
    runtime = TwinRuntime(size=64 << 30)
    library = AttentionLibraryAdapter(ops, runtime, 64, torch.bfloat16)
    ops.pack_weight(torch.zeros(32, 32))

    def body(inputs: Any) -> Any:
        return inputs

    wide = verify_variant(4)
    for bucket, few in (
        (Bucket(Stage.DECODE, (1,)), True), (Bucket(Stage.DECODE, (16,)), True), (Bucket(Stage.DECODE, (17,)), False),
        (Bucket(Stage.VERIFY, (4,), wide), True), (Bucket(Stage.VERIFY, (5,), wide), False),
        (Bucket(Stage.PREFILL, (16, 2)), True), (Bucket(Stage.PREFILL, (64, 2)), False),
    ):  # fmt: skip
        wrapped = library.wrap_body(InputBuffers(bucket, Sizes(16, 40, 50, 2, group=2, processors=132), runtime), body)
        assert (wrapped is body) == (few and switch == "1"), bucket


@pytest.mark.parametrize(("group", "kv_heads", "d"), [(7, 4, 128), (2, 2, 64), (8, 8, 128)])
def test_the_ledger_counts_what_a_plan_works_in(
    group: int, kv_heads: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of a stage share one room, as large as its largest bucket needs; prices have it on paper."""
    flashinfer.install(monkeypatch)
    found = attention_library_selector.select_library("FLASHINFER", 90)
    from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes

    runtime, launches = TwinRuntime(size=64 << 30), list[FlashInferLaunch]()
    cuda = Sizes(16, 40, 50, kv_heads, group=group, processors=132)
    planned = InputSizes(50, 16, 40, kv_heads, group=group, head_dim=d)
    counted = attending(SERVING, "FLASHINFER")
    for bucket in (Bucket(Stage.DECODE, (256,)), Bucket(Stage.DECODE, (1,)), Bucket(Stage.PREFILL, (2048, 64))):
        buffers = InputBuffers(bucket, cuda, runtime)
        before = runtime.accounted.taken
        launches.append(
            FlashInferLaunch(found.calls, buffers, runtime, FlashInferWorkspaces(runtime), d, torch.bfloat16)
        )
        taken = runtime.accounted.taken - before
        beside = counted(bucket, planned) - attending(SERVING, "")(bucket, planned)
        assert beside == shape_policy.infer_bytes(bucket, planned) and 0 <= beside - taken < 4096, bucket
    assert shape_policy.infer_bytes(Bucket(Stage.SAMPLE, (8,)), planned) == 0


def test_other_devices_have_their_own_attention(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = from_command_line([], {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}).engine
    assert given.attention_backend == "FLASHINFER"
    for word, want in (
        ("flash_attn", "FLASH_ATTN"), ("FLASH_ATTN_VLLM_V1", "FLASH_ATTN"), ("auto", ""),
        ("xformers", "TRITON_ATTN"), ("TRITON", "TRITON_ATTN"), ("triton_attn_vllm_v1", "TRITON_ATTN"),
    ):  # fmt: skip
        assert from_command_line(["--attention-backend", word], {}).engine.attention_backend == want
        assert from_command_line(["--attention-config.backend", word], {}).engine.attention_backend == want
    with pytest.raises(StartupError, match=r"^--attention-config\.backend: 'x' is no attention"):
        from_command_line(["--attention-config.backend", "x"], {})
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        LLM(str(demo_path()), device="cpu", max_model_len=64, attention_backend="FLASHINFER").close()
    said = [r.getMessage() for r in caplog.records if "--attention" in r.getMessage()]
    assert said == ["--attention-backend FLASHINFER has no effect: cpu has its own attention"]
