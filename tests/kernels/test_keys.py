"""A whole engine whose kernels are launched as on a card and never computed: what Triton would compile, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
from pathlib import Path
import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

class Kernel:
    function = packed_metadata = None
    launch_metadata = run = staticmethod(lambda *args: None)

driver.set_active(Driver())
triton.compiler.compile = lambda *args, **kwargs: Kernel()

from benchmarks.gpu.mixed import Traffic, drive
from trencadis import LLM
from trencadis.backends.cuda import ops
from trencadis.backends.cuda.cuda_runtime import CompileCounter
from trencadis.backends.cuda.cpu_twin import ops as twin_ops

for name in ("draw_with_logprobs", "draw_tokens", "pick_greedy"):
    def launch(*args, launch=getattr(ops.sample, name)):
        launch(*args)
        for t in args[-1]:  # nobody wrote the outputs
            if t is not None:
                t.zero_()
    setattr(ops.sample, name, launch)
twin_ops.TwinOps = lambda *_: ops.CudaOps()

DRAFTED = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
           "spec_always": True}
before = CompileCounter()
llm = LLM(sys.argv[1], dtype="bfloat16", device="cuda", policy="twin", enforce_eager=sys.argv[2] == "eager",
          kv_cache_memory_bytes=8 << 20, max_model_len=512, max_num_seqs=24, max_num_batched_tokens=256,
          mm_processor_kwargs={"min_pixels": 3136, "max_pixels": 224 * 224},
          **(DRAFTED if "drafts" in sys.argv else {}))
after = CompileCounter()
count, ended = drive(llm.engine, Traffic(llm.engine.info().vocab_size - 64, 200, 12), int(sys.argv[3]), 24, 1e30)
verified = llm.engine.scheduler.totals.spec_drafts if "drafts" in sys.argv else 1
assert verified, "nothing was drafted"
print("warm-up", before.count() - after.count(), "then", after.count(), after.names(), dict(ended))
kinds = {name.rpartition(".")[2] for name in before.names()}
print("kernels", *sorted(kinds))
assert before.count() and not after.count(), after.names()
ops.activation.silu_mul(torch.zeros(3, 14), torch.zeros(3, 7))  # a width that no model here has
assert after.count() == 1, "nobody counts"
"""

KERNELS = {
    "items_kernel", "join_kernel", "windows_kernel", "images_kernel", "rotary_kernel",
    "rope_kernel", "_rms_norm", "_silu_mul", "_act", "_embed", "_gather", "_scatter", "_patches", "_reset",
    "skinny_kernel", "turned_items_kernel", "verify_items_kernel",
    "greedy_parts_kernel", "greedy_pick_kernel", "parts_kernel", "draw_kernel", "told_kernel",
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "requests"),
    [
        ("eager", 60),
        pytest.param("eager drafts", 60, marks=pytest.mark.long),
        pytest.param("graphs", 60, marks=pytest.mark.long),
        pytest.param("eager", 1500, marks=pytest.mark.long),
    ],
)
def test_mixed_requests_ask_for_nothing_that_warmup_did_not(vl_checkpoint: Path, mode: str, requests: int) -> None:
    """Without graphs every launch passes Triton's cache of specialisations; its hook counts what is new."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRENCADIS_CACHE": str(vl_checkpoint)}
    command = [sys.executable, "-P", "-c", CODE, str(vl_checkpoint), mode.split()[0], str(requests), *mode.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    assert set(done.stdout.split("kernels ")[1].split()) == KERNELS
