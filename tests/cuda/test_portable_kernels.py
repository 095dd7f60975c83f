"""Kernels of another accelerator hold no instruction of NVIDIA's: each asks the accelerator, and has a portable way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs

from trencadis.backends.cuda.kernels import code_decoding, gpu_platform, tile_sizes
from trencadis.backends.cuda.kernels.gpu_platform import Accelerator
from trencadis.backends.cuda.kernels.layers import dependent_launch, skinny_quantised_gemm
from trencadis.backends.cuda.weights.quantised_weight import E4M3

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from trencadis.backends.cuda.kernels import gpu_platform
from trencadis.backends.cuda.kernels.gpu_platform import Accelerator
from tools.kernel_cases import CASES
from tools.kernel_resources import record

class Xpu(Accelerator):
    name = "xpu"

def lower(launch):
    target = GPUTarget("cuda", 90, 32)
    backend, place = make_backend(target), launch.kernel.arg_names.index
    aligned = {(place(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, aligned)
    options, context = backend.parse_options({"num_warps": 4, **launch.options}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    return str(source.make_ir(target, options, functions, backend.get_module_map(), context))

gpu_platform.use({"xpu": Xpu, "cuda": Accelerator}[sys.argv[1]]())
seen = {}
for group in sys.argv[2:]:
    for case, run in CASES[group](90):
        for launch in record(run):
            key = (launch.kernel.__name__, launch.constants.get("KIND"))
            if key not in seen:
                asm = "inline_asm" in lower(launch)
                seen[key] = f"{key[0]} {key[1]} {'asm' if asm else 'portable'} {'launch_pdl' in launch.options}"
print(*seen.values(), sep="\\n")
"""
"""Prints for each kernel, and each kind of quantised weight: whether the IR of a launch has instructions of PTX, and
whether it is a dependent launch. The tiles are those of a card of compute capability 9.0, which has all of them."""


class Xpu(Accelerator):
    """Cards that torch has in ``torch.xpu``."""

    name = "xpu"


PTX = {"skinny_kernel None", "coded_skinny_kernel 0", "coded_skinny_kernel 1", "coded_skinny_kernel 2",
       "quantised_kernel 1", "quantised_kernel 2", "decoding_kernel 1", "decoding_kernel 2",
       *(f"coded_experts{part}kernel {kind}" for part in ("_", "_down_") for kind in (1, 2, 4))}  # fmt: skip
DEPENDENT = {"skinny_kernel None", "turned_items_kernel None", "verify_items_kernel None", "join_kernel None",
             "rounded_rows_kernel None",
             *(f"coded_skinny_kernel {kind}" for kind in range(3))}  # fmt: skip
"""What a card of NVIDIA's runs."""


def lowered(accelerator: str, *groups: str) -> dict[str, tuple[bool, bool]]:
    """Kernel and kind -> (holds PTX, is a dependent launch)."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    line = [sys.executable, "-P", "-c", CODE, accelerator, *groups]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=140)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [text.rsplit(" ", 2) for text in done.stdout.splitlines()]
    return {name: (asm == "asm", dependent == "True") for name, asm, dependent in rows}


@pytest.mark.parametrize("accelerator", [Accelerator, Xpu])
def test_other_cards_are_never_asked_for_ptx(accelerator: type[Accelerator], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number a package gives its cards as their architecture."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(tile_sizes, "arch_of", lambda device: 100)
    monkeypatch.setattr(gpu_platform._Chosen, "accelerator", accelerator())
    weight: Any = SimpleNamespace(kind=E4M3)
    asked = (
        code_decoding.is_packed(torch.bfloat16), bool(code_decoding.find_conversion(weight, torch.device("cpu"))),
        dependent_launch.possible(torch.device("cpu")),
    )  # fmt: skip
    assert set(asked) == {accelerator is Accelerator}


@pytest.mark.parametrize(("accelerator", "rows"), [(Accelerator, 8), (Xpu, 16)])
def test_products_of_other_cards_have_sixteen_rows(
    accelerator: type[Accelerator], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's least product of NVIDIA's cards has eight, that of others may have more."""
    weight: Any = SimpleNamespace(kind=E4M3)
    monkeypatch.setattr(tile_sizes, "arch_of", lambda device: 90)
    monkeypatch.setattr(gpu_platform._Chosen, "accelerator", accelerator())
    assert skinny_quantised_gemm.tile_of(torch.empty(1, 64, dtype=torch.bfloat16), weight, False).m == rows


@pytest.mark.long
def test_kernels_of_another_card_are_portable() -> None:
    """The IR of each, at the tiles of a card that would have them."""
    found = lowered("xpu", "layers", "quantised", "coded_experts")
    assert found.keys() >= PTX | DEPENDENT and set(found.values()) == {(False, False)}


@pytest.mark.long
def test_kernels_of_nvidia_use_what_its_cards_have() -> None:
    """Without which the test above would show nothing."""
    found = lowered("cuda", "layers", "quantised", "coded_experts")
    assert {name for name, (asm, _) in found.items() if asm} == PTX
    assert {name for name, (_, dependent) in found.items() if dependent} == DEPENDENT


def test_ptx_stands_in_few_functions() -> None:
    """Each is called under a constant that follows from ``Accelerator.runs_ptx``."""
    found = set()
    for path in sorted((ROOT / "backends" / "cuda").rglob("*.py")):
        for function in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)):
            text = ast.unparse(function)
            if "inline_asm" in text or "gdc_" in text or "libdevice" in text:
                found.add(function.name)
    decoders = {"decode_floats", "place_floats", "decode_pairs", "decode_fp4"}
    assert found == {*decoders, "fetch", "wait"}
