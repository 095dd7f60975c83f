"""What cannot run says so at start-up, naming the limit and what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trencadis.backends.cuda import make_backend, pick_dtype, support_checks
from trencadis.core import devices
from trencadis.core.device.backend import BackendConfig, load
from trencadis.core.errors import StartupError

GOOD: dict[str, Any] = {
    "heads": 16, "kv_heads": 2, "head_dim": 128, "vision_head_dim": 80, "vocab_size": 151_936, "dtype": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 520}, ("520", "512", "--device cpu")),
        ({"head_dim": 20}, ("20", "multiples of 8", "--device cpu")),
        ({"vision_head_dim": 136}, ("136", "128")),
        ({"heads": 34}, ("17 query heads", "1 to 16")),
        ({"block_size": 8}, ("--block-size 8", "16, 32, 64, 128")),
        ({"dtype": torch.float64}, ("float64", "bfloat16")),
        ({"vocab_size": 1 << 21}, ("2097152", "1048576")),
        ({"max_tokens": 1 << 20, "batch_invariant": True}, ("--max-num-batched-tokens 1048576", "65535", "259000")),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_models_that_no_kernel_takes(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    support_checks.check_model(BackendConfig(**GOOD))
    with pytest.raises(StartupError) as error:
        make_backend(BackendConfig(**{**GOOD, **changes}))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card() -> None:
    with pytest.raises(StartupError, match=r"no NVIDIA card.*--device cpu"):
        load("cuda")(BackendConfig(**GOOD))


@pytest.mark.parametrize(("card", "has"), [("Tesla T4", (7, 5)), ("Tesla V100-SXM2-16GB", (7, 0))])
def test_an_old_card(monkeypatch: pytest.MonkeyPatch, card: str, has: tuple[int, int]) -> None:
    monkeypatch.setattr(support_checks, "_absence_reason", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: has)
    monkeypatch.setattr(support_checks, "_no_compiler_reason", lambda: "")
    line = rf"{card} has compute capability 7\.{has[1]}.*8\.0 \(Ampere\).*--device cpu"
    with pytest.raises(StartupError, match=line) as said:
        support_checks.pick_device(0)
    assert "\n" not in str(said.value)
    with pytest.raises(StartupError, match="cuda:1: there is no such card, there are 1, from 0 on"):
        support_checks.pick_device(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert support_checks.pick_device(0) == torch.device("cuda", 0)
    monkeypatch.setattr(support_checks, "version", lambda name: "3.4.0")
    with pytest.raises(StartupError, match=r"triton 3\.4\.0 is too old"):
        support_checks.pick_device(0)


@pytest.mark.parametrize(
    ("cuda", "nodes", "words"),
    [
        (None, True, ("this build of torch has no CUDA", "install a CUDA build")),
        (None, False, ("there is none",)),
        ("12.8", True, ("driver on your system is too old (found version 11040)", "update the NVIDIA driver")),
        ("12.8", False, ("Found no NVIDIA driver",)),
    ],
)
def test_why_torch_sees_no_card(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, nodes: bool, words: tuple[str, ...]
) -> None:
    def init() -> None:
        old = "The NVIDIA driver on your system is too old (found version 11040)."
        raise RuntimeError((old if nodes else "Found no NVIDIA driver") + "\nmore lines")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(support_checks, "card_nodes", lambda: nodes)
    with pytest.raises(StartupError) as error:
        support_checks.pick_device(0)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert support_checks.unusable_reason() and not support_checks.cards()


def test_more_ranks_than_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_checks, "_absence_reason", lambda: "")
    monkeypatch.setattr(support_checks, "_no_compiler_reason", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StartupError, match="--tensor-parallel-size 4 needs 4 cards and there are 2"):
        support_checks.pick_device(0, 4)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton would fail in the middle of the start; kernels in its cache need no compiler."""
    monkeypatch.setattr(support_checks, "_absence_reason", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(StartupError, match=r"no C compiler.*apt install gcc python3-dev.*--device cpu"):
        support_checks.pick_device(0)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(support_checks.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})  # type: ignore[attr-defined]
    with pytest.raises(StartupError, match=r"there is no .*Python\.h"):
        support_checks.pick_device(0)
    (tmp_path / "ABC").mkdir()
    (tmp_path / "ABC" / "cuda_utils.cpython-312.so").touch()
    assert support_checks.pick_device(0) == torch.device("cuda", 0)


def test_choosing_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.choose("cuda:3") == ("cuda", 3, "")
    assert devices.choose("hpu") == ("hpu", 0, "")
    monkeypatch.setattr(support_checks, "unusable_reason", lambda: "there is none")
    assert devices.choose("auto") == ("cpu", 0, "--device auto: there is none; using the CPU.")
    monkeypatch.setattr(support_checks, "unusable_reason", lambda: "")
    assert devices.choose("auto") == ("cuda", 0, "")
    for wrong in ("cuda:x", "cuda:", "cuda:-1"):
        with pytest.raises(StartupError, match="is no index"):
            devices.choose(wrong)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise support_checks.PackageNotFoundError(name)  # type: ignore[attr-defined]

    monkeypatch.setattr(support_checks, "_absence_reason", lambda: "")
    monkeypatch.setattr(support_checks, "version", missing)
    with pytest.raises(StartupError, match=r"trencadis\[cuda\]"):
        support_checks.pick_device(0)


@pytest.mark.parametrize(
    ("requested", "stored", "want"),
    [
        ("auto", "bfloat16", torch.bfloat16), ("auto", "float16", torch.float16), ("auto", "float32", torch.bfloat16),
        ("half", "bfloat16", torch.float16), ("float32", "bfloat16", torch.float32),
    ],
)  # fmt: skip
def test_dtypes(requested: str, stored: str, want: torch.dtype) -> None:
    assert pick_dtype(requested, stored) is want
    with pytest.raises(StartupError, match="--dtype float8 is not supported on cuda"):
        pick_dtype("float8", stored)


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, "highest"), (torch.bfloat16, "high")])
def test_products_of_float32_are_exact(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, left: str) -> None:
    """NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, with which torch begins at "high" (TF32). What a
    caller has chosen for other work of the process stays where an engine has no such products."""
    monkeypatch.setattr(support_checks, "pick_device", lambda *_: torch.device("cpu"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        make_backend(BackendConfig(dtype=dtype))
        assert torch.get_float32_matmul_precision() == left
    finally:
        torch.set_float32_matmul_precision(before)


REFUSED = "Triton Error [CUDA]: operation not supported"


@pytest.mark.parametrize("refuses", ["", "launch", "capture"])
def test_a_driver_that_refuses_dependent_launches(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    """One line, and the same kernels one after another."""
    from triton import knobs

    from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
    from trencadis.backends.cuda.kernels import tile_sizes
    from trencadis.backends.cuda.kernels.layers import dependent_launch

    monkeypatch.setattr(dependent_launch._Driver, "refuses", False)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(tile_sizes, "arch_of", lambda device: 90)
    calls = list[int]()

    def probe(out: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == {"launch": 1, "capture": 2}.get(refuses):
            raise RuntimeError(REFUSED)

    monkeypatch.setattr(dependent_launch, "probe", probe)
    runtime = TwinRuntime()
    assert dependent_launch.possible(runtime.device)
    note = support_checks.try_dependent_launch(runtime)
    assert dependent_launch.possible(runtime.device) is not bool(refuses)
    assert bool(note) is bool(refuses) and "\n" not in note
    if refuses:
        assert REFUSED in note and "one after another" in note
        assert support_checks.try_dependent_launch(runtime) == "" and len(calls) < 3, "it is not tried again"
    assert not any(runtime.pools.values())


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_no_dependent_launch_is_tried_where_none_is_used(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    from triton import knobs

    from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
    from trencadis.backends.cuda.kernels import tile_sizes
    from trencadis.backends.cuda.kernels.layers import dependent_launch

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(tile_sizes, "arch_of", lambda device: 90 if wanted == "0" else 89)
    monkeypatch.setattr(dependent_launch, "_is_wanted", lambda: wanted == "1")
    monkeypatch.setattr(dependent_launch, "probe", lambda out: pytest.fail("it was tried"))
    assert support_checks.try_dependent_launch(TwinRuntime()) == ""
