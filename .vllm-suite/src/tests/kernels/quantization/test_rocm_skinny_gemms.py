# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import math

import pytest
import torch

import vllm._custom_ops as ops
from tests.kernels.quant_utils import ref_dynamic_per_tensor_fp8_quant
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.platforms.rocm import on_gfx950
from vllm.utils.platform_utils import num_compute_units

# Global per-test cleanup costs more than the tests themselves.
# These tests can just cleanup once at the end
pytestmark = pytest.mark.skip_global_cleanup

SEEDS = [0]

# These options are independent in the kernels, so the sets below cover every
# pair of them instead of the full product. bias_mode: 0 = none, 1 = (m,),
# 2 = (n, m).
OPTIONS_WVSPLITKRC = [
    # dtype, padded_a, bias_mode, xnorm
    (torch.float16, False, 0, False),
    (torch.float16, True, 1, True),
    (torch.float16, True, 2, False),
    (torch.bfloat16, True, 0, True),
    (torch.bfloat16, False, 1, False),
    (torch.bfloat16, False, 2, True),
]

OPTIONS_WVSPLITK = [
    # dtype, padded_a, padded_b, bias_mode, xnorm
    (torch.float16, False, False, 0, False),
    (torch.float16, False, True, 1, True),
    (torch.float16, True, False, 2, True),
    (torch.bfloat16, True, True, 0, True),
    (torch.bfloat16, True, False, 1, False),
    (torch.bfloat16, False, True, 2, False),
]

OPTIONS_WVSPLITK_FP8 = [
    # dtype, padded_a, padded_b, biased, xnorm
    (torch.float16, False, False, True, True),
    (torch.bfloat16, True, False, False, True),
    (torch.bfloat16, False, True, True, True),
    (torch.float16, True, False, True, False),
    (torch.float16, False, True, False, False),
    (torch.bfloat16, True, True, False, False),
]

DTYPES = [torch.bfloat16, torch.float16]

# kWvSlots in csrc/rocm/skinny_gemms.cu; beyond it streams take overflow
# workspaces.
WVSPLITKRC_SLOTS = 8

# The CU count is the grid size. Production passes num_compute_units(); a small
# value manufactures better concurrency for these tests.
WVSPLITKRC_TEST_CU = 16

# Gate spin, ~125 ms on gfx950 -- must outlast the host enqueue loop it gates.
_GATE_CYCLES = 300_000_000

# Specific (N, K, M) combinations for targeted testing
NKM_FACTORS_LLMM1 = [
    # Small, medium, large cases
    (1, 8, 16),
    (1, 32, 64),
    (1, 128, 256),
    (1, 512, 1024),
    (1, 2048, 4096),
    # Edge cases with specific K sizes
    (1, 6144, 1024),
    (1, 8192, 2048),
    # Very large case
    (1, 4096, 8192),
]

NKM_FACTORS_WVSPLITK = [
    # Different batch sizes with key dimensions
    (1, 32, 16),
    (1, 64, 64),
    (2, 256, 256),
    (3, 1024, 1024),
    (4, 4096, 4096),
    (4, 4096, 4096 + 1),
    (4, 4096 + 16, 4096),
    (4, 4096 + 16, 4096 + 1),
    # Extended K values
    (1, 9216, 512),
    (2, 10240, 1024),
    (4, 16384, 8192),
    (4, 16384 * 2, 8192),
    (4, 16384 * 2, 8192 + 1),
    (4, 16384 * 2 + 16, 8192),
    (4, 16384 * 2 + 16, 8192 + 1),
    # Minimum M constraint validation (m >= 8)
    (1, 64, 8),
    (2, 128, 8),
    (4, 256, 8),
]

# N is bucketed up to its next ^2 (16/32/64/128) and the remainder is masked
N_FACTORS_WVSPLITKRC = [
    13,
    16,
    17,
    25,
    29,
    31,
    32,
    41,
    51,
    64,
    71,
    81,
    91,
    103,
    117,
    128,
]
# K shards are 512 wide, evenly divided or not, +8 for a partial 8-element load
K_FACTORS_WVSPLITKRC = [2880, 2880 + 8, 3072, 3072 + 8]
# M tiles are 64 rows, +16 for a partial tile
M_FACTORS_WVSPLITKRC = [128, 128 + 16, 256, 256 + 16, 640, 640 + 16]

# (N, K, M) with more K-shards than the readback can stage in one LDS pass.
# Spans both CHUNKK values and both N-tile counts.
NKM_FACTORS_WVSPLITKRC_LARGE_K = [
    (128, 6144, 128),
    (96, 8192, 128),
    # Keep 24 K-shards (batched readback) within the DPX budget of 128 CUs.
    (128, 12288, 64),
    (32, 12288, 128),
]

NKM_FACTORS_WVSPLITK_FP8 = [
    # FP8-specific cases with K % 16 == 0
    (1, 16, 16),
    (1, 32, 16 + 16),
    (1, 64, 64),
    (1, 64, 64 + 16),
    (1, 64 + 16, 64),
    (1, 64 + 16, 64 + 16),
    (4, 64, 64),
    (4, 64, 64 + 16),
    (4, 64 + 16, 64),
    (4, 64 + 16, 64 + 16),
    (2, 512, 512),
    (3, 512, 512),
    (3, 512, 512 + 16),
    (4, 512, 512),
    (3, 2048, 2048),
    (3, 2048, 2048 + 16),
    (4, 2048 + 16, 2048),
    (4, 2048 + 16, 2048 + 16),
    (4, 4096, 4096),
    (4, 16400, 2048),
    (4, 16400, 2048 + 16),
    # Extended FP8 dimensions not covered by WVSPLITK
    (1, 14336, 1024),
    (2, 24576, 2048),
    (4, 32768, 28672),
    (4, 32768 * 2, 28672),
    (4, 32768 * 2, 28672 + 16),
    (4, 32768 * 2 + 16, 28672),
    (4, 32768 * 2 + 16, 28672 + 16),
]


@pytest.fixture(scope="module", autouse=True)
def cleanup_after_all_tests():
    yield
    cleanup_dist_env_and_memory()


def pad_fp8(weight):
    num_pad = 256 // weight.element_size()
    import torch.nn.functional as F

    return F.pad(weight, (0, num_pad), "constant", 0)[..., :-num_pad]


def make_bias(bias_mode, n, m, dtype):
    if bias_mode == 0:
        return None
    shape = (m,) if bias_mode == 1 else (n, m)
    return torch.rand(shape, dtype=dtype, device="cuda") * 2 - 1


@pytest.mark.parametrize("n", N_FACTORS_WVSPLITKRC)
@pytest.mark.parametrize("k", K_FACTORS_WVSPLITKRC)
@pytest.mark.parametrize("m", M_FACTORS_WVSPLITKRC)
@pytest.mark.parametrize("dtype,padded_a,bias_mode,xnorm", OPTIONS_WVSPLITKRC)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.skipif(not current_platform.is_rocm(), reason="only test for rocm")
@pytest.mark.skipif(not on_gfx950(), reason="only meant for gfx950")
def test_rocm_wvsplitkrc_kernel(n, k, m, dtype, padded_a, bias_mode, xnorm, seed):
    torch.manual_seed(seed)
    cu_count = num_compute_units()

    # Next ^2 of n
    N_p2 = 1 << (n - 1).bit_length()
    # With 64 Ms per CU (each of 4 SIMDs working on a 16x16 tile),
    # and each working on a 512-shard of K, how many CUs would we need?
    rndup_cus = ((m + 64 - 1) // 64) * ((k + 512 - 1) // 512)
    # How many of 4 waves in a group can work on same 16 Ms at same time?
    # This reduces the Ms each group works on, i.e. increasing the number of CUs needed.
    GrpsShrB = min(N_p2 // 16, 4)
    # Given the above, how many CUs would we need?
    CuNeeded = rndup_cus * GrpsShrB
    # Deterministic reduction stores one float workspace value per K shard.
    fits_wvsplitkrc = (N_p2 * m * ((k + 512 - 1) // 512)) <= 128 * 1024 * 12
    fits_wvsplitkrc &= CuNeeded <= cu_count

    if not fits_wvsplitkrc:
        pytest.skip("Too large for wvSplitKrc")

    xavier = (
        math.sqrt(2 / k) if xnorm else 1
    )  # normalize to avoid large output-bias deltas
    A = torch.randn(n, k, dtype=dtype, device="cuda") * xavier
    B = torch.randn(m, k, dtype=dtype, device="cuda") * xavier
    if padded_a:
        A = pad_fp8(A)

    BIAS = make_bias(bias_mode, n, m, dtype)

    ref_out = torch.nn.functional.linear(A, B, BIAS)
    out = ops.wvSplitKrc(A, B, cu_count, BIAS)

    if xnorm:
        # The O(1) bias lifts outputs to ~O(1), where one bf16 ULP (~3.9e-3, the
        # worst measured divergence) exceeds 1e-3. Bump atol to 5e-3 only for
        # biased bf16 (above that ULP, still under finfo(bf16).eps); keep 1e-3
        # otherwise.
        atol = 5e-3 if (dtype == torch.bfloat16 and BIAS is not None) else 1e-3
        torch.testing.assert_close(out, ref_out, atol=atol, rtol=1e-8)
    else:
        torch.testing.assert_close(out, ref_out, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("n,k,m", NKM_FACTORS_WVSPLITKRC_LARGE_K)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.skipif(not current_platform.is_rocm(), reason="only test for rocm")
@pytest.mark.skipif(not on_gfx950(), reason="only meant for gfx950")
def test_rocm_wvsplitkrc_large_k(n, k, m, dtype, seed):
    """K large enough that the split-K readback must stage LDS in batches."""
    torch.manual_seed(seed)

    xavier = math.sqrt(2 / k)
    A = (torch.rand(n, k, dtype=dtype, device="cuda") * 2 - 1) * xavier
    B = (torch.rand(m, k, dtype=dtype, device="cuda") * 2 - 1) * xavier

    ref_out = torch.nn.functional.linear(A, B, None)
    out = ops.wvSplitKrc(A, B, num_compute_units(), None)

    torch.testing.assert_close(out, ref_out, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("n_streams", [WVSPLITKRC_SLOTS, WVSPLITKRC_SLOTS + 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.skipif(not current_platform.is_rocm(), reason="only test for rocm")
@pytest.mark.skipif(not on_gfx950(), reason="only meant for gfx950")
def test_rocm_wvsplitkrc_multistream(n_streams, dtype, seed):
    """Concurrent streams must not share a split-K workspace.

    The workspace is cleared by protocol rather than per invocation, so sharing
    one corrupts the reduction and returns wrong numbers rather than failing.
    n_streams > WVSPLITKRC_SLOTS additionally exercises the overflow path.
    """
    torch.manual_seed(seed)

    n, k, m = 16, 2048, 256
    iters = 4
    xavier = math.sqrt(2 / k)

    B = torch.randn(m, k, dtype=dtype, device="cuda") * xavier
    As = [
        torch.randn(n, k, dtype=dtype, device="cuda") * xavier for _ in range(n_streams)
    ]
    refs = [torch.nn.functional.linear(A, B, None) for A in As]
    torch.accelerator.synchronize()

    streams = [torch.Stream() for _ in range(n_streams)]
    outs: list[list[torch.Tensor]] = [[] for _ in range(n_streams)]
    _release_together(streams)
    # Round-robin the enqueues so kernels from different streams are in flight
    # at the same time.
    for _ in range(iters):
        for i, s in enumerate(streams):
            with torch.cuda.stream(s):
                outs[i].append(ops.wvSplitKrc(As[i], B, WVSPLITKRC_TEST_CU, None))
    for s in streams:
        torch.accelerator.current_stream().wait_stream(s)
    torch.accelerator.synchronize()

    for i in range(n_streams):
        for out in outs[i]:
            torch.testing.assert_close(out, refs[i], atol=1e-3, rtol=1e-2)


def _release_together(streams):
    """Release every stream at once, once everything below is enqueued.

    An event recorded on an idle stream is already complete, so waiting on it
    gates nothing -- the spin, not the event, is what holds the streams.
    """
    blocker = torch.Stream()
    with torch.cuda.stream(blocker):
        torch.cuda._sleep(_GATE_CYCLES)
        gate = torch.Event()
        gate.record()
    for s in streams:
        s.wait_event(gate)


@pytest.mark.parametrize("n,k,m", NKM_FACTORS_LLMM1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows_per_block", [2, 4, 8, 16])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.skipif(not current_platform.is_rocm(), reason="only test for rocm")
@torch.inference_mode()
def test_rocm_llmm1_kernel(n, k, m, dtype, rows_per_block, seed):
    torch.manual_seed(seed)
    # TODO: Zero-centering the inputs causes errors for LLMM1!
    #      Without that the numbers quickly saturate, and may
    #      be giving false matches.
    A = torch.rand(n, k, dtype=dtype, device="cuda")
    B = torch.rand(m, k, dtype=dtype, device="cuda")

    ref_out = torch.matmul(A, B.t())
    out = ops.LLMM1(B, A, rows_per_block)

    torch.testing.assert_close(out, ref_out, atol=1e-8, rtol=1e-2)


@pytest.mark.parametrize("n,k,m", NKM_FACTORS_WVSPLITK)
@pytest.mark.parametrize(
    "dtype,padded_a,padded_b,bias_mode,xnorm",
    OPTIONS_WVSPLITK,
)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.skipif(not current_platform.is_rocm(), reason="only test for rocm")
def test_rocm_wvsplitk_kernel(
    n, k, m, dtype, padded_a, padded_b, bias_mode, xnorm, seed
):
    torch.manual_seed(seed)
    cu_count = num_compute_units()

    xavier = (
        math.sqrt(2 / k) if xnorm else 1
    )  # normalize to avoid large output-bias deltas
    A = (torch.rand(n, k, dtype=dtype, device="cuda") * 2 - 1) * xavier
    B = (torch.rand(m, k, dtype=dtype, device="cuda") * 2 - 1) * xavier

    BIAS = make_bias(bias_mode, n, m, dtype)

    if padded_a:
        A = pad_fp8(A)
    if padded_b:
        B = pad_fp8(B)

    ref_out = torch.nn.functional.linear(A, B, BIAS)
    out = ops.wvSplitK(B, A.view(-1, A.size(-1)), cu_count, BIAS)

    # Accumulation error in fp16 GEMM scales with sqrt(K)
    atol = torch.finfo(dtype).eps * math.sqrt(k)
    torch.testing.assert_close(out, ref_out, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("n,k,m", NKM_FACTORS_WVSPLITK_FP8)
@pytest.mark.parametrize(
    "dtype,padded_a,padded_b,biased,xnorm",
    OPTIONS_WVSPLITK_FP8,
)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.skipif(
    not (current_platform.is_rocm() and current_platform.supports_fp8()),
    reason="only test for rocm fp8",
)
def test_rocm_wvsplitk_fp8_kernel(
    n, k, m, dtype, padded_a, padded_b, biased, xnorm, seed
):
    torch.manual_seed(seed)

    xavier = math.sqrt(2 / k) if xnorm else 1  # normalize to avoid large deltas
    A = (torch.rand(n, k, device="cuda") * 2 - 1) * xavier
    B = (torch.rand(m, k, device="cuda") * 2 - 1) * xavier

    A, scale_a = ref_dynamic_per_tensor_fp8_quant(A)
    B, scale_b = ref_dynamic_per_tensor_fp8_quant(B)
    if padded_b:
        B = pad_fp8(B)
    if padded_a:
        A = pad_fp8(A)

    BIAS = None if (not biased) else (torch.rand(m, dtype=dtype, device="cuda") * 2 - 1)

    ref_out = torch._scaled_mm(
        A, B.t(), out_dtype=dtype, scale_a=scale_a, scale_b=scale_b, bias=BIAS
    )
    out = ops.wvSplitKQ(B, A, dtype, scale_a, scale_b, num_compute_units(), BIAS)

    if xnorm:
        torch.testing.assert_close(out, ref_out, atol=1e-3, rtol=1e-8)
    elif k >= 32 * 1024:
        # wider pytrch thresh for large-K & no xnorm
        torch.testing.assert_close(out, ref_out, atol=0.07, rtol=5e-2)
    else:
        torch.testing.assert_close(out, ref_out, atol=1e-2, rtol=1e-2)
