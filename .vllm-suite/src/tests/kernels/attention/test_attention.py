# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import random

import pytest
import torch

from tests.kernels.allclose_default import get_default_atol, get_default_rtol
from tests.kernels.utils import opcheck
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import Attention, MMEncoderAttention
from vllm.platforms import current_platform
from vllm.utils.mem_utils import get_max_shared_memory_bytes
from vllm.utils.torch_utils import set_random_seed

pytestmark = pytest.mark.skip_global_cleanup

FLOAT32_BYTES = torch.finfo(torch.float).bits // 8
# This will change depending on the compute capability.
# - 512 as a buffer
MAX_SEQ_LEN = get_max_shared_memory_bytes() // FLOAT32_BYTES - 512
# There may not be enough gpu memory due to large NUM_BLOCKS.
# Reduce NUM_BLOCKS when it happens.
NUM_BLOCKS = 4321  # Arbitrary values for testing
PARTITION_SIZE_ROCM = 256
DTYPES = [torch.bfloat16, torch.float16]
NUM_GEN_SEQS = [7]  # Arbitrary values for testing
NUM_HEADS = [(32, 8), (40, 40), (64, 8)]  # Arbitrary values for testing

# Head sizes supported by the ROCm paged attention kernel.
HEAD_SIZES = [64, 128]

BLOCK_SIZES = [16, 32]
USE_ALIBI = [False, True]
KV_CACHE_DTYPE = ["auto", "fp8"]
SEEDS = [0]
CUDA_DEVICES = [
    f"cuda:{i}" for i in range(1 if torch.accelerator.device_count() == 1 else 2)
]


def ref_masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    attn_weights = scale * torch.einsum("qhd,khd->hqk", query, key).float()
    if attn_mask is not None:
        attn_weights = attn_weights + attn_mask.float()
    attn_weights = torch.softmax(attn_weights, dim=-1).to(value.dtype)
    out = torch.einsum("hqk,khd->qhd", attn_weights, value)
    return out


def ref_single_query_cached_kv_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    num_queries_per_kv: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    alibi_slopes: torch.Tensor | None,
) -> None:
    num_query_heads = query.shape[1]
    num_kv_heads = value_cache.shape[1]
    head_size = value_cache.shape[2]
    block_size = value_cache.shape[3]
    num_seqs = query.shape[0]

    block_tables_lst = block_tables.cpu().tolist()
    seq_lens_lst = seq_lens.cpu().tolist()
    for i in range(num_seqs):
        q = query[i].unsqueeze(0)
        block_table = block_tables_lst[i]
        seq_len = int(seq_lens_lst[i])

        keys_lst: list[torch.Tensor] = []
        values_lst: list[torch.Tensor] = []
        for j in range(seq_len):
            block_number = int(block_table[j // block_size])
            block_offset = j % block_size

            k = key_cache[block_number, :, :, block_offset, :]
            k = k.reshape(num_kv_heads, head_size)
            keys_lst.append(k)

            v = value_cache[block_number, :, :, block_offset]
            values_lst.append(v)
        keys = torch.stack(keys_lst, dim=0)
        values = torch.stack(values_lst, dim=0)
        if num_queries_per_kv > 1:
            # Handle MQA and GQA
            keys = torch.repeat_interleave(keys, num_queries_per_kv, dim=1)
            values = torch.repeat_interleave(values, num_queries_per_kv, dim=1)

        alibi_bias = None
        if alibi_slopes is not None:
            # Create the ALiBi bias used in the paged attention kernel.
            position_ids = torch.arange(seq_len).int()
            alibi_bias = (position_ids - seq_len + 1).float()
            alibi_bias = alibi_slopes.view(-1, 1, 1) * alibi_bias.view(1, 1, -1)

        out = ref_masked_attention(q, keys, values, scale, alibi_bias)
        out = out.view(num_query_heads, head_size)
        output[i].copy_(out, non_blocking=True)


@pytest.mark.skipif(
    not current_platform.is_rocm(), reason="ROCm-only paged attention kernel"
)
@pytest.mark.parametrize("num_seqs", NUM_GEN_SEQS)
@pytest.mark.parametrize("num_heads", NUM_HEADS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("use_alibi", USE_ALIBI)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPE)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("device", CUDA_DEVICES)
@pytest.mark.parametrize("use_interleaved_v_cache", [False, True])
def test_paged_attention(
    kv_cache_factory,
    num_seqs: int,
    num_heads: tuple[int, int],
    head_size: int,
    use_alibi: bool,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    seed: int,
    device: str,
    use_interleaved_v_cache: bool,
) -> None:
    if current_platform.is_navi() and (
        kv_cache_dtype == "fp8"
        or head_size != 128
        or block_size != 16
        or use_alibi
        or use_interleaved_v_cache
    ):
        pytest.skip()

    set_random_seed(seed)
    torch.set_default_device(device)
    scale = float(1.0 / (head_size**0.5))
    num_query_heads, num_kv_heads = num_heads
    query = torch.empty(num_seqs, num_query_heads, head_size, dtype=dtype)
    query.uniform_(-scale, scale)

    assert num_query_heads % num_kv_heads == 0
    num_queries_per_kv = num_query_heads // num_kv_heads
    alibi_slopes = None
    if use_alibi:
        alibi_slopes = torch.randn(num_query_heads, dtype=torch.float)

    seq_lens_lst = [random.randint(1, MAX_SEQ_LEN) for _ in range(num_seqs)]
    seq_lens_lst[-1] = MAX_SEQ_LEN
    max_seq_len = max(seq_lens_lst)
    seq_lens = torch.tensor(seq_lens_lst, dtype=torch.int)

    # Create the block tables.
    max_num_blocks_per_seq = (max_seq_len + block_size - 1) // block_size
    block_tables_lst: list[list[int]] = []
    for seq_idx, seq_len in enumerate(seq_lens_lst):
        block_table = [
            random.randint(num_seqs, NUM_BLOCKS - 1)
            for _ in range(max_num_blocks_per_seq)
        ]
        # Keep the last block private to this sequence so its padding can be
        # poisoned without corrupting valid tokens from another sequence.
        block_table[(seq_len - 1) // block_size] = seq_idx
        block_tables_lst.append(block_table)

    block_tables = torch.tensor(block_tables_lst, dtype=torch.int)

    # Create the KV caches.
    key_caches, value_caches = kv_cache_factory(
        NUM_BLOCKS,
        block_size,
        1,
        num_kv_heads,
        head_size,
        kv_cache_dtype,
        dtype,
        seed,
        device,
    )
    key_cache, value_cache = key_caches[0], value_caches[0]

    k_scale_value = 0.5 if kv_cache_dtype == "fp8" else 1.0
    v_scale_value = 0.25 if kv_cache_dtype == "fp8" else 1.0
    k_scale = torch.tensor(k_scale_value, dtype=torch.float32, device=device)
    v_scale = torch.tensor(v_scale_value, dtype=torch.float32, device=device)

    if kv_cache_dtype == "fp8":
        padding_nan = 0x80 if current_platform.is_fp8_fnuz() else 0x7F
    else:
        padding_nan = torch.nan
    for seq_idx, seq_len in enumerate(seq_lens_lst):
        padding_start = seq_len % block_size
        if padding_start:
            last_block_idx = block_tables_lst[seq_idx][seq_len // block_size]
            value_cache[last_block_idx, :, :, padding_start:] = padding_nan

    standard_value_cache = value_cache
    if use_interleaved_v_cache:
        # Hand the kernel V in the interleaved layout (same 4D shape); the
        # reference below gets the standard layout back.
        x_v = 16 // value_cache.element_size()
        value_cache = (
            value_cache.view(
                NUM_BLOCKS, num_kv_heads, head_size, block_size // x_v, x_v
            )
            .permute(0, 1, 3, 2, 4)
            .contiguous()
            .view(NUM_BLOCKS, num_kv_heads, head_size, block_size)
        )

    # Call the paged attention kernel.
    output = torch.empty_like(query)
    num_partitions = (max_seq_len + PARTITION_SIZE_ROCM - 1) // PARTITION_SIZE_ROCM
    assert PARTITION_SIZE_ROCM % block_size == 0
    num_seqs, num_heads, head_size = output.shape
    tmp_output = torch.empty(
        size=(num_seqs, num_heads, num_partitions, head_size),
        dtype=output.dtype,
    )
    exp_sums = torch.empty(
        size=(num_seqs, num_heads, num_partitions),
        dtype=torch.float32,
    )
    max_logits = torch.empty_like(exp_sums)
    ops.paged_attention_rocm(
        output,
        exp_sums,
        max_logits,
        tmp_output,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        None,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        use_interleaved_v_cache=use_interleaved_v_cache,
    )

    opcheck(
        torch.ops._rocm_C.paged_attention,
        (
            output,
            exp_sums,
            max_logits,
            tmp_output,
            query,
            key_cache,
            value_cache,
            num_kv_heads,
            scale,
            block_tables,
            seq_lens,
            None,
            block_size,
            max_seq_len,
            alibi_slopes,
            kv_cache_dtype,
            k_scale,
            v_scale,
            None,
            "f16",
            use_interleaved_v_cache,
        ),
        cond=(head_size == 64 and block_size == BLOCK_SIZES[0]),
    )

    value_cache = standard_value_cache

    # Run the reference implementation.
    if kv_cache_dtype == "fp8":
        # Convert cache data back to dtype.
        x = 16 // torch.tensor([], dtype=dtype).element_size()
        key_cache_shape = (NUM_BLOCKS, num_kv_heads, head_size // x, block_size, x)
        dequantized_key_cache = torch.empty(
            size=key_cache_shape, dtype=dtype, device=device
        )
        ops.convert_fp8(dequantized_key_cache, key_cache, k_scale_value)
        key_cache = dequantized_key_cache

        value_cache_shape = value_cache.shape
        dequantized_value_cache = torch.empty(
            size=value_cache_shape, dtype=dtype, device=device
        )
        ops.convert_fp8(dequantized_value_cache, value_cache, v_scale_value)
        value_cache = dequantized_value_cache

    ref_output = torch.empty_like(query)
    ref_single_query_cached_kv_attention(
        ref_output,
        query,
        num_queries_per_kv,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale,
        alibi_slopes,
    )

    # NOTE(woosuk): Due to the kernel-level differences in the two
    # implementations, there is a small numerical difference in the two
    # outputs. Thus, we use a relaxed tolerance for the test.
    atol = get_default_atol(output) if current_platform.is_rocm() else 1e-3
    rtol = get_default_rtol(output) if current_platform.is_rocm() else 1e-5

    # NOTE(zhaoyang): FP8 KV Cache will introduce quantization error,
    # so we use a relaxed tolerance for the test.
    atol, rtol = 1e-3, 1e-5
    if kv_cache_dtype == "fp8":
        atol, rtol = 1e-2, 1e-5
    torch.testing.assert_close(output, ref_output, atol=atol, rtol=rtol)


@pytest.mark.parametrize("attention_cls", [Attention, MMEncoderAttention])
def test_num_heads_not_divisible_by_num_kv_heads(attention_cls: type) -> None:
    head_size = 64
    scale = float(1.0 / (head_size**0.5))
    num_heads = 16
    num_kv_heads = 5
    with pytest.raises(AssertionError):
        _ = attention_cls(
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=num_kv_heads,
        )


UNSUPPORTED_HEAD_SIZES = [32, 80, 96, 160, 192, 224, 256]


@pytest.mark.skipif(
    not current_platform.is_rocm(), reason="ROCm-only paged attention kernel"
)
@pytest.mark.parametrize("head_size", UNSUPPORTED_HEAD_SIZES)
def test_paged_attention_unsupported_head_sizes(
    kv_cache_factory, head_size: int
) -> None:
    """Verify ROCm paged attention rejects unsupported head sizes."""
    torch.set_default_device("cuda")
    num_seqs, num_kv_heads, block_size, max_seq_len = 1, 8, 16, 128
    scale = head_size**-0.5

    query = torch.empty(num_seqs, num_kv_heads, head_size, dtype=torch.bfloat16)
    key_caches, value_caches = kv_cache_factory(
        NUM_BLOCKS, block_size, 1, num_kv_heads, head_size, "auto", torch.bfloat16, 0
    )
    block_tables = torch.zeros(num_seqs, 1, dtype=torch.int32)
    seq_lens = torch.tensor([max_seq_len], dtype=torch.int32)

    output = torch.empty_like(query)
    num_partitions = (max_seq_len + PARTITION_SIZE_ROCM - 1) // PARTITION_SIZE_ROCM
    tmp_output = torch.empty(num_seqs, num_kv_heads, num_partitions, head_size)
    exp_sums = torch.empty(num_seqs, num_kv_heads, num_partitions, dtype=torch.float32)
    k_scale = v_scale = torch.tensor(1.0, dtype=torch.float32, device="cuda")

    with pytest.raises(RuntimeError, match="Unsupported head size"):
        ops.paged_attention_rocm(
            output,
            exp_sums,
            torch.empty_like(exp_sums),
            tmp_output,
            query,
            key_caches[0],
            value_caches[0],
            num_kv_heads,
            scale,
            block_tables,
            seq_lens,
            None,
            block_size,
            max_seq_len,
            None,
            "auto",
            k_scale,
            v_scale,
        )
