# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from tests.v1.attention.utils import (
    BatchSpec,
    create_common_attn_metadata,
    create_vllm_config,
)
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.nvidia.kda_metadata import (
    KimiK3KDAAttentionBackend,
    KimiK3KDAMetadata,
    KimiK3KDAMetadataBuilder,
    _mamba_get_block_table_tensor,
    stage_spec_decode_metadata,
)
from vllm.models.kimi_k3.nvidia.model import KimiLinearForCausalLM
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.recoverssm_metadata import (
    RecoverSSMPostprocessMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import (
    NULL_BLOCK_ID,
    mamba_get_block_table_tensor,
)
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.mamba_utils import validate_mamba_state_copy_funcs

BLOCK_SIZE = 16
DEVICE = torch.device("cpu")
PRUNED_METADATA_FIELDS = {
    "chunk_indices",
    "chunk_offsets",
    "prefill_query_start_loc",
    "prefill_state_indices",
    "prefill_has_initial_state",
    "spec_sequence_masks",
    "spec_sequence_masks_cpu",
    "uniform_spec_sequence_length",
    "flashinfer_prefill_query_start_loc",
    "flashinfer_prefill_seq_order",
}


def _assert_matches_shared_gdn(
    reference: GDNAttentionMetadata, actual: KimiK3KDAMetadata
):
    assert actual.recoverssm_commit is None
    assert actual.recoverssm_context is None
    for field in fields(GDNAttentionMetadata):
        actual_value = getattr(actual, field.name)
        if field.name in PRUNED_METADATA_FIELDS:
            assert actual_value is None
            continue
        expected_value = getattr(reference, field.name)
        if (
            field.name in {"spec_token_indx", "non_spec_token_indx"}
            and actual.num_spec_decodes > 0
            and actual.num_prefills == 0
            and actual.num_decodes == 0
        ):
            assert actual_value is None
            continue
        if isinstance(actual_value, torch.Tensor):
            torch.testing.assert_close(actual_value, expected_value)
        elif field.name == "nums_dict":
            assert (actual_value is None) == (expected_value is None)
            if actual_value is not None:
                assert actual_value[8]["tot"] == expected_value[8]["tot"]
                torch.testing.assert_close(
                    actual_value[8]["nums"], expected_value[8]["nums"]
                )
        else:
            assert actual_value == expected_value


def _make_builder(
    builder_cls: type[AttentionMetadataBuilder],
    num_speculative_tokens: int,
    full_cuda_graph: bool,
    device: torch.device = DEVICE,
    mamba_cache_mode: str = "none",
    use_recoverssm: bool = False,
    num_prefill_checkpoint_blocks: int = 0,
    mamba_block_size: int = BLOCK_SIZE,
    prefix_match_unit: int | None = None,
    use_eagle: bool = False,
    disable_eagle_block_drop: bool = False,
    cache_hit_alignment_tokens: int | None = None,
    hash_block_size: int | None = None,
) -> AttentionMetadataBuilder:
    vllm_config = create_vllm_config(
        model_name="Qwen/Qwen3.5-0.8B",
        block_size=BLOCK_SIZE,
    )
    if num_speculative_tokens:
        vllm_config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_speculative_tokens,
        )
        if use_eagle:
            vllm_config.speculative_config.method = "eagle3"
            vllm_config.speculative_config.disable_eagle_block_drop = (
                disable_eagle_block_drop
            )
    vllm_config.compilation_config.cudagraph_mode = (
        CUDAGraphMode.FULL_AND_PIECEWISE if full_cuda_graph else CUDAGraphMode.NONE
    )
    vllm_config.cache_config.mamba_cache_mode = mamba_cache_mode
    vllm_config.cache_config.use_replayssm = use_recoverssm
    vllm_config.cache_config.use_kda_recoverssm = use_recoverssm
    vllm_config.cache_config.prefix_match_unit = prefix_match_unit
    hash_block_size = hash_block_size or prefix_match_unit or mamba_block_size
    vllm_config.cache_config.hash_block_size = hash_block_size
    vllm_config.cache_config.cache_hit_alignment_tokens = (
        cache_hit_alignment_tokens or hash_block_size
    )
    builder = builder_cls(
        kv_cache_spec=MambaSpec(
            block_size=mamba_block_size,
            shapes=((16, 64),),
            dtypes=(torch.float16,),
            mamba_cache_mode=mamba_cache_mode,
            num_speculative_blocks=(0 if use_recoverssm else num_speculative_tokens),
            num_prefill_checkpoint_blocks=num_prefill_checkpoint_blocks,
            prefill_checkpoint_alignment=(
                16 if num_prefill_checkpoint_blocks > 0 else None
            ),
        ),
        layer_names=["layer.0"],
        vllm_config=vllm_config,
        device=device,
    )
    if use_recoverssm:
        assert isinstance(builder, KimiK3KDAMetadataBuilder)
        builder.recoverssm_context = Mock()
    return builder


def test_kda_recoverssm_startup_metadata_flow_without_model(monkeypatch):
    """Exercise KDA RecoverSSM startup without loading Kimi-K3 weights."""
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    monkeypatch.setattr("vllm.v1.attention.backends.utils.PIN_MEMORY", False)
    layout_config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(
                linear_attn_config={
                    "num_heads": 4,
                    "head_dim": 32,
                    "short_conv_kernel_size": 4,
                }
            ),
        ),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            use_kda_recoverssm=True,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
    )
    kv_cache_spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=KimiLinearForCausalLM.get_mamba_state_shape_from_config(layout_config),
        dtypes=KimiLinearForCausalLM.get_mamba_state_dtype_from_config(layout_config),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=16,
    )

    # This is the same compatibility check performed while initializing the
    # model runner. RecoverSSM keeps its verify records outside the KV cache.
    validate_mamba_state_copy_funcs(
        {kv_cache_spec: [0]},
        {
            MambaAttentionBackendEnum.GDN_ATTN: (
                KimiLinearForCausalLM.get_mamba_state_copy_func()
            )
        },
    )
    assert len(kv_cache_spec.shapes) == 2

    builder_config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(linear_key_head_dim=32),
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align",
            use_kda_recoverssm=True,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=2,
            parallel_drafting=False,
            use_eagle_block_drop=Mock(return_value=False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.NONE,
            max_cudagraph_capture_size=None,
            static_forward_context={},
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        additional_config={},
        num_speculative_tokens=2,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=True,
    )
    builder = KimiK3KDAMetadataBuilder(
        kv_cache_spec=kv_cache_spec,
        layer_names=["layer.0"],
        vllm_config=builder_config,
        device=DEVICE,
    )
    builder_config.cache_config.hash_block_size = BLOCK_SIZE
    builder_config.cache_config.cache_hit_alignment_tokens = BLOCK_SIZE

    # An all-prefill speculative batch used to leave an all-false spec mask
    # alive, then access active_non_spec_mask_cpu before it was initialized.
    prefill_common = create_common_attn_metadata(
        BatchSpec(seq_lens=[50], query_lens=[50]),
        BLOCK_SIZE,
        DEVICE,
        arange_block_indices=True,
    ).replace(is_prefilling=torch.tensor([True]))
    builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
        prefill_common.block_table_tensor,
        prefill_common.seq_lens,
        kv_cache_spec,
        "align",
    )
    prefill_metadata = builder.build(
        0,
        prefill_common,
        num_decode_draft_tokens_cpu=torch.tensor([-1], dtype=torch.int32),
        num_accepted_tokens=torch.ones(1, dtype=torch.int32),
    )
    assert prefill_metadata.num_prefills == 1
    assert prefill_metadata.num_spec_decodes == 0
    assert prefill_metadata.checkpoint is not None

    # Creating the commit context is the first metadata path that consumes the
    # builder's layer_names. Mock only the GPU-cache-dependent constructor.
    builder.recoverssm_context = None
    forward_layer = Mock(recoverssm_backend="triton")
    builder.vllm_config.compilation_config.static_forward_context["layer.0"] = (
        forward_layer
    )
    spec_common = create_common_attn_metadata(
        BatchSpec(seq_lens=[20], query_lens=[3]),
        BLOCK_SIZE,
        DEVICE,
        arange_block_indices=True,
    ).replace(is_prefilling=torch.tensor([False]))
    builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
        spec_common.block_table_tensor,
        spec_common.seq_lens,
        kv_cache_spec,
        "align",
    )
    recoverssm_context = Mock()
    with patch(
        "vllm.models.kimi_k3.nvidia.ops.recoverssm.KDARecoverSSMCommitContext.create",
        return_value=recoverssm_context,
    ) as create_context:
        spec_metadata = builder.build(
            0,
            spec_common,
            num_decode_draft_tokens_cpu=torch.tensor([2], dtype=torch.int32),
            num_accepted_tokens=torch.ones(1, dtype=torch.int32),
        )

    assert spec_metadata.num_spec_decodes == 1
    assert spec_metadata.recoverssm_commit is not None
    assert spec_metadata.recoverssm_context is recoverssm_context
    create_context.assert_called_once_with(
        [forward_layer],
        spec_query_len=3,
        max_num_reqs=builder.vllm_config.scheduler_config.max_num_seqs,
        backend="triton",
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
@pytest.mark.parametrize(
    "batch,prefix_match_unit,hit_alignment,expected_offsets,expected_states",
    [
        (
            BatchSpec(seq_lens=[50, 32], query_lens=[50, 16]),
            None,
            16,
            [48, 0],
            [2, NULL_BLOCK_ID],
        ),
        (
            BatchSpec(seq_lens=[50, 32], query_lens=[50, 16]),
            16,
            16,
            [48, 0],
            [2, NULL_BLOCK_ID],
        ),
        (BatchSpec(seq_lens=[530], query_lens=[530]), None, 128, [512], [32]),
        (BatchSpec(seq_lens=[530], query_lens=[50]), None, 128, [32], [32]),
        (BatchSpec(seq_lens=[530], query_lens=[530]), 16, 16, [528], [32]),
        (BatchSpec(seq_lens=[530], query_lens=[50]), 16, 16, [48], [32]),
    ],
)
def test_internal_checkpoint_metadata_targets_last_aligned_boundary(
    batch, prefix_match_unit, hit_alignment, expected_offsets, expected_states
):
    device = torch.device("cuda")
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device, arange_block_indices=True
    ).replace(is_prefilling=torch.tensor([True] * len(batch.seq_lens)))
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=0,
        full_cuda_graph=False,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefix_match_unit=prefix_match_unit,
        cache_hit_alignment_tokens=hit_alignment,
        hash_block_size=16,
        device=device,
    )
    assert isinstance(builder, KimiK3KDAMetadataBuilder)
    builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
        common_attn_metadata.block_table_tensor,
        common_attn_metadata.seq_lens,
        builder.kv_cache_spec,
        "align",
    )
    actual = builder.build(0, common_attn_metadata)

    assert actual.checkpoint is not None
    torch.testing.assert_close(
        actual.checkpoint.state_indices,
        torch.tensor(expected_states, dtype=torch.int32, device=device),
    )
    torch.testing.assert_close(
        actual.checkpoint.checkpoint_offsets,
        torch.tensor(expected_offsets, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize(
    (
        "seq_len",
        "disable_eagle_block_drop",
        "num_hash_lookahead_tokens",
        "prefix_match_unit",
        "expected_offset",
    ),
    [
        (100, False, 0, 16, 80),
        (100, True, 0, 16, 96),
        (100, False, 1, 16, 96),
        (100, False, 0, 8, None),
        (96, False, 0, 16, 80),
        (96, True, 0, 16, 80),
    ],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
def test_spec_internal_checkpoint_metadata_targets_replay_boundary(
    monkeypatch: pytest.MonkeyPatch,
    seq_len: int,
    disable_eagle_block_drop: bool,
    num_hash_lookahead_tokens: int,
    prefix_match_unit: int,
    expected_offset: int | None,
) -> None:
    """Lookahead hashes need no back-off from the replay boundary."""
    monkeypatch.setattr(
        VllmConfig,
        "num_hash_lookahead_tokens",
        property(lambda _: num_hash_lookahead_tokens),
    )
    device = torch.device("cuda")
    batch = BatchSpec(seq_lens=[seq_len], query_lens=[seq_len])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device, arange_block_indices=True
    )
    common_attn_metadata = common_attn_metadata.replace(
        is_prefilling=torch.tensor([True]),
        block_table_tensor=common_attn_metadata.block_table_tensor + 1,
    )
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=3,
        full_cuda_graph=False,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        mamba_block_size=64,
        prefix_match_unit=prefix_match_unit,
        use_eagle=True,
        disable_eagle_block_drop=disable_eagle_block_drop,
        device=device,
    )
    assert isinstance(builder, KimiK3KDAMetadataBuilder)
    builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
        common_attn_metadata.block_table_tensor,
        common_attn_metadata.seq_lens,
        builder.kv_cache_spec,
        "align",
    )
    actual = builder.build(0, common_attn_metadata)

    if expected_offset is None:
        assert actual.checkpoint is None
        return
    assert actual.checkpoint is not None
    torch.testing.assert_close(
        actual.checkpoint.state_indices,
        torch.tensor([1], dtype=torch.int32, device=device),
    )
    torch.testing.assert_close(
        actual.checkpoint.checkpoint_offsets,
        torch.tensor([expected_offset], dtype=torch.int32, device=device),
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
def test_internal_checkpoint_metadata_skips_unaligned_offset():
    device = torch.device("cuda")
    # The checkpoint block boundary is 48, but this query starts at token 1,
    # making the real checkpoint offset 47, which is not FlashKDA-aligned.
    batch = BatchSpec(seq_lens=[50], query_lens=[49])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device, arange_block_indices=True
    ).replace(is_prefilling=torch.tensor([True]))
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=0,
        full_cuda_graph=False,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefix_match_unit=16,
        device=device,
    )
    assert isinstance(builder, KimiK3KDAMetadataBuilder)
    builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
        common_attn_metadata.block_table_tensor,
        common_attn_metadata.seq_lens,
        builder.kv_cache_spec,
        "align",
    )
    actual = builder.build(0, common_attn_metadata)

    assert actual.checkpoint is None


@pytest.mark.parametrize(
    (
        "batch",
        "num_decode_draft_tokens",
        "num_speculative_tokens",
        "full_cuda_graph",
        "is_prefilling",
        "expected_uniform_spec_sequence_length",
    ),
    [
        pytest.param(
            BatchSpec(seq_lens=[50, 30], query_lens=[3, 3]),
            [2, 2],
            2,
            False,
            [False, False],
            3,
            id="pure-spec-decode",
        ),
        pytest.param(
            BatchSpec(seq_lens=[100, 65, 20], query_lens=[50, 1, 3]),
            [-1, -1, 2],
            2,
            False,
            [True, False, False],
            3,
            id="mixed-prefill-and-spec-decode",
        ),
        pytest.param(
            BatchSpec(seq_lens=[40, 30], query_lens=[1, 1]),
            None,
            0,
            False,
            [False, False],
            None,
            id="regular-decode",
        ),
        pytest.param(
            BatchSpec(seq_lens=[40, 30], query_lens=[1, 1]),
            [0, 0],
            2,
            False,
            [False, False],
            1,
            id="no-scheduled-draft-tokens",
        ),
        pytest.param(
            BatchSpec(seq_lens=[50, 30], query_lens=[3, 2]),
            [2, 1],
            2,
            False,
            [False, False],
            None,
            id="ragged-spec-decode",
        ),
    ],
)
def test_kimi_k3_kda_metadata_matches_shared_gdn(
    batch: BatchSpec,
    num_decode_draft_tokens: list[int] | None,
    num_speculative_tokens: int,
    full_cuda_graph: bool,
    is_prefilling: list[bool],
    expected_uniform_spec_sequence_length: int | None,
):
    kwargs: dict[str, torch.Tensor] = {}
    if num_decode_draft_tokens is not None:
        kwargs = {
            "num_decode_draft_tokens_cpu": torch.tensor(
                num_decode_draft_tokens, dtype=torch.int32
            ),
            "num_accepted_tokens": torch.ones(
                batch.batch_size, dtype=torch.int32, device=DEVICE
            ),
        }

    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.tensor(is_prefilling, dtype=torch.bool))
    reference = _make_builder(
        GDNAttentionMetadataBuilder,
        num_speculative_tokens,
        full_cuda_graph,
    ).build(
        0,
        common_attn_metadata,
        **kwargs,
    )
    actual = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens,
        full_cuda_graph,
    ).build(0, common_attn_metadata, **kwargs)

    assert isinstance(actual, KimiK3KDAMetadata)
    _assert_matches_shared_gdn(reference, actual)
    assert (
        reference.uniform_spec_sequence_length == expected_uniform_spec_sequence_length
    )


def test_mixed_regular_and_spec_decode_uses_packed_decode_metadata():
    batch = BatchSpec(seq_lens=[100, 65, 20], query_lens=[1, 1, 3])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.tensor([False, False, False]))
    actual = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=False,
    ).build(
        0,
        common_attn_metadata,
        num_decode_draft_tokens_cpu=torch.tensor([-1, -1, 2], dtype=torch.int32),
        num_accepted_tokens=torch.ones(3, dtype=torch.int32, device=DEVICE),
    )

    # The K3 layer dispatches the non-spec subgroup to packed decode whenever
    # it contains no prefill request.
    assert actual.num_decodes == 2
    assert actual.num_decode_tokens == 2
    assert actual.num_prefills == 0
    assert actual.num_prefill_tokens == 0
    assert actual.has_initial_state is None
    assert actual.nums_dict is None
    assert actual.non_spec_query_start_loc is None
    torch.testing.assert_close(actual.non_spec_token_indx, torch.tensor([0, 1]))
    torch.testing.assert_close(actual.spec_token_indx, torch.tensor([2, 3, 4]))
    assert actual.non_spec_token_start == 0
    assert actual.spec_token_start == 2
    torch.testing.assert_close(
        actual.spec_query_start_loc,
        torch.tensor([0, 3], dtype=torch.int32),
    )


def test_mixed_regular_and_spec_decode_excludes_request_padding():
    batch = BatchSpec(seq_lens=[16, 65, 20], query_lens=[0, 1, 3])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.tensor([False, False, False]))
    actual = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=False,
    ).build(
        0,
        common_attn_metadata,
        num_decode_draft_tokens_cpu=torch.tensor([-1, -1, 2], dtype=torch.int32),
        num_accepted_tokens=torch.ones(3, dtype=torch.int32, device=DEVICE),
    )

    assert actual.num_decodes == 1
    assert actual.non_spec_state_indices_tensor is not None
    assert actual.non_spec_state_indices_tensor.shape == (1,)
    torch.testing.assert_close(actual.non_spec_token_indx, torch.tensor([0]))
    torch.testing.assert_close(actual.spec_token_indx, torch.tensor([1, 2, 3]))
    assert actual.non_spec_token_start == 0
    assert actual.spec_token_start == 1


@pytest.mark.parametrize("mamba_cache_mode", ["none", "align"])
def test_recoverssm_spec_uses_one_state_slot_and_current_window(
    mamba_cache_mode: str,
):
    if mamba_cache_mode == "align" and not torch.cuda.is_available():
        pytest.skip("align metadata construction requires CUDA")
    device = torch.device("cuda") if mamba_cache_mode == "align" else DEVICE
    batch = BatchSpec(seq_lens=[100, 65, 20], query_lens=[1, 1, 3])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device
    ).replace(is_prefilling=torch.tensor([True, True, False]))
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=False,
        device=device,
        mamba_cache_mode=mamba_cache_mode,
        use_recoverssm=True,
    )
    assert isinstance(builder, KimiK3KDAMetadataBuilder)
    if mamba_cache_mode == "align":
        builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.seq_lens,
            builder.kv_cache_spec,
            mamba_cache_mode,
        )
    context = builder.recoverssm_context
    assert context is not None
    actual = builder.build(
        0,
        common_attn_metadata,
        num_decode_draft_tokens_cpu=torch.tensor([-1, -1, 2], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([3, 2, 2], dtype=torch.int32, device=device),
    )

    assert actual.spec_state_indices_tensor is not None
    assert actual.spec_state_indices_tensor.shape == (1, 1)
    torch.testing.assert_close(
        actual.num_accepted_tokens,
        torch.ones(1, dtype=torch.int32, device=device),
    )
    commit_metadata = actual.recoverssm_commit
    assert commit_metadata is not None
    torch.testing.assert_close(
        commit_metadata.request_indices,
        torch.tensor([2], dtype=torch.int32, device=device),
    )
    assert actual.recoverssm_context is context
    num_accepted_tokens = torch.tensor([3, 2, 1], dtype=torch.int32, device=device)

    postprocess = actual.commit_recoverssm_state(num_accepted_tokens)

    if mamba_cache_mode == "none":
        assert commit_metadata.align is None
        assert postprocess is None
    else:
        assert isinstance(postprocess, RecoverSSMPostprocessMetadata)
        assert postprocess.num_spec_decodes == 1
        assert postprocess.request_indices is commit_metadata.request_indices
        assert postprocess.block_table is common_attn_metadata.block_table_tensor
        assert (
            postprocess.num_computed_tokens
            is common_attn_metadata.compute_num_computed_tokens()
        )
        assert postprocess.block_size == BLOCK_SIZE
    args = context.commit.call_args.args
    assert args[0] is num_accepted_tokens
    torch.testing.assert_close(args[1], commit_metadata.state_indices[:, 0])
    torch.testing.assert_close(args[2], commit_metadata.query_start_loc)


def test_recoverssm_distinguishes_draftless_decode_from_one_token_prefill():
    batch = BatchSpec(seq_lens=[40, 30], query_lens=[1, 1])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.tensor([False, True]))
    actual = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=False,
        use_recoverssm=True,
    ).build(
        0,
        common_attn_metadata,
        num_decode_draft_tokens_cpu=torch.full((2,), -1, dtype=torch.int32),
        num_accepted_tokens=torch.ones(2, dtype=torch.int32),
    )

    assert actual.num_spec_decodes == 1
    assert actual.num_decodes == 0
    assert actual.num_prefills == 1
    assert actual.spec_state_indices_tensor is not None
    assert actual.spec_state_indices_tensor.shape == (1, 1)
    torch.testing.assert_close(
        actual.spec_query_start_loc,
        torch.tensor([0, 1], dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("seq_len", "expected_has_initial_state"),
    [
        pytest.param(1, False, id="first-token-prefill"),
        pytest.param(65, True, id="final-one-token-prefill-chunk"),
    ],
)
def test_mixed_one_token_prefill_and_spec_decode_uses_prefill_metadata(
    seq_len: int,
    expected_has_initial_state: bool,
):
    batch = BatchSpec(seq_lens=[seq_len, 20], query_lens=[1, 3])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.tensor([True, False]))
    actual = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=False,
    ).build(
        0,
        common_attn_metadata,
        num_decode_draft_tokens_cpu=torch.tensor([-1, 2], dtype=torch.int32),
        num_accepted_tokens=torch.ones(2, dtype=torch.int32, device=DEVICE),
    )

    assert actual.num_prefills == 1
    assert actual.num_prefill_tokens == 1
    assert actual.num_decodes == 0
    assert actual.num_decode_tokens == 0
    assert actual.has_initial_state is not None
    assert actual.has_initial_state.tolist() == [expected_has_initial_state]
    assert actual.non_spec_query_start_loc is not None
    torch.testing.assert_close(
        actual.non_spec_query_start_loc,
        torch.tensor([0, 1], dtype=torch.int32),
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
def test_kimi_k3_kda_cudagraph_capture_matches_shared_gdn():
    device = torch.device("cuda")
    batch = BatchSpec(seq_lens=[50, 30], query_lens=[3, 3])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device
    ).replace(is_prefilling=torch.tensor([False, False]))
    reference = _make_builder(
        GDNAttentionMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=True,
        device=device,
    ).build_for_cudagraph_capture(common_attn_metadata)
    actual = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=True,
        device=device,
    ).build_for_cudagraph_capture(common_attn_metadata)

    assert isinstance(actual, KimiK3KDAMetadata)
    _assert_matches_shared_gdn(reference, actual)


@pytest.mark.parametrize(
    "builder_cls",
    [
        GDNAttentionMetadataBuilder,
        # The Kimi-K3 builder stages spec-decode state indices on the device.
        pytest.param(
            KimiK3KDAMetadataBuilder,
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="requires CUDA"
            ),
        ),
    ],
)
def test_cudagraph_capture_metadata_avoids_device_to_host_copy(
    builder_cls: type[AttentionMetadataBuilder], monkeypatch: pytest.MonkeyPatch
):
    """`build_for_cudagraph_capture` is not capture-only: a DP rank with nothing
    scheduled re-stages its FULL-graph metadata through it on every dummy step,
    so it must not synchronize the device. The host-side draft counts have to
    come from `query_start_loc_cpu` and match the device-derived values."""
    num_speculative_tokens = 2
    batch = BatchSpec(seq_lens=[50, 30], query_lens=[3, 3])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device
    ).replace(is_prefilling=torch.zeros(batch.batch_size, dtype=torch.bool))
    builder = _make_builder(
        builder_cls, num_speculative_tokens, full_cuda_graph=True, device=device
    )

    device_to_host_copies: list[torch.Size] = []
    original_cpu = torch.Tensor.cpu

    def counting_cpu(self: torch.Tensor, *args, **kwargs):
        device_to_host_copies.append(self.shape)
        return original_cpu(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cpu", counting_cpu)
    actual = builder.build_for_cudagraph_capture(common_attn_metadata)
    monkeypatch.undo()

    assert not device_to_host_copies, device_to_host_copies

    num_accepted_tokens = torch.diff(common_attn_metadata.query_start_loc)
    reference = builder.build(
        0,
        common_attn_metadata,
        num_accepted_tokens,
        (num_accepted_tokens - 1).cpu(),
    )
    assert actual.num_spec_decodes == batch.batch_size
    assert actual.num_decodes == 0
    assert actual.num_prefills == 0
    for field in fields(type(actual)):
        actual_value = getattr(actual, field.name)
        reference_value = getattr(reference, field.name)
        if isinstance(actual_value, torch.Tensor):
            torch.testing.assert_close(actual_value, reference_value)
        else:
            assert actual_value == reference_value, field.name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
def test_recoverssm_spec_cudagraph_stages_one_checkpoint_per_request():
    device = torch.device("cuda")
    batch = BatchSpec(seq_lens=[50, 30], query_lens=[3, 3])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, device
    ).replace(is_prefilling=torch.tensor([False, False]))
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=True,
        device=device,
        use_recoverssm=True,
    )
    assert isinstance(builder, KimiK3KDAMetadataBuilder)
    assert builder.spec_state_indices_tensor.shape == (
        builder.vllm_config.scheduler_config.max_num_seqs,
        1,
    )
    actual = builder.build_for_cudagraph_capture(common_attn_metadata)

    assert actual.spec_state_indices_tensor is not None
    assert actual.spec_state_indices_tensor.shape == (batch.batch_size, 1)
    assert actual.num_accepted_tokens is not None
    torch.testing.assert_close(
        actual.num_accepted_tokens,
        torch.ones(batch.batch_size, dtype=torch.int32, device=device),
    )
    assert actual.recoverssm_commit is not None
    assert actual.recoverssm_commit.request_indices is None


def test_kimi_k3_kda_backend_uses_private_metadata_builder():
    assert KimiK3KDAAttentionBackend.get_builder_cls() is KimiK3KDAMetadataBuilder
    assert KimiK3KDAAttentionBackend.is_ssm()
    assert issubclass(KimiK3KDAAttentionBackend, GDNAttentionBackend)
    assert issubclass(KimiK3KDAMetadata, GDNAttentionMetadata)
    assert issubclass(KimiK3KDAMetadataBuilder, GDNAttentionMetadataBuilder)


def test_kimi_k3_metadata_uses_precomputed_aligned_state_indices():
    batch = BatchSpec(seq_lens=[40, 30], query_lens=[1, 1])
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.tensor([False, False]))
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=2,
        full_cuda_graph=False,
        mamba_cache_mode="align",
    )
    assert isinstance(builder, KimiK3KDAMetadataBuilder)
    precomputed_indices = torch.tensor(
        [
            [101, 102, 103],
            [201, 202, 203],
            [301, 302, 303],
        ],
        dtype=torch.int32,
    )
    builder.mamba_aligned_state_indices = precomputed_indices

    metadata = builder.build(0, common_attn_metadata)

    torch.testing.assert_close(
        metadata.non_spec_state_indices_tensor,
        precomputed_indices[: batch.batch_size, 0],
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
def test_stage_spec_decode_metadata_matches_pytorch():
    device = torch.device("cuda")
    num_spec_decodes = 33
    batch_size = 65
    num_state_slots = 3
    state_indices = torch.arange(
        num_spec_decodes * 32,
        dtype=torch.int32,
        device=device,
    ).reshape(num_spec_decodes, 32)[:, :num_state_slots]
    query_start_loc = (
        torch.arange(num_spec_decodes + 1, dtype=torch.int32, device=device)
        * num_state_slots
    )
    num_accepted_tokens = (
        torch.arange(num_spec_decodes, dtype=torch.int32, device=device)
        % num_state_slots
        + 1
    )

    staged_state_indices = torch.empty(
        (batch_size, num_state_slots), dtype=torch.int32, device=device
    )
    staged_query_start_loc = torch.empty(
        batch_size + 1, dtype=torch.int32, device=device
    )
    staged_num_accepted_tokens = torch.empty(
        batch_size, dtype=torch.int32, device=device
    )
    stage_spec_decode_metadata(
        state_indices,
        query_start_loc,
        num_accepted_tokens,
        staged_state_indices,
        staged_query_start_loc,
        staged_num_accepted_tokens,
        num_spec_decodes=num_spec_decodes,
    )

    expected_state_indices = torch.full_like(staged_state_indices, NULL_BLOCK_ID)
    expected_state_indices[:num_spec_decodes] = state_indices
    expected_query_start_loc = torch.full(
        (batch_size + 1,),
        query_start_loc[-1],
        dtype=torch.int32,
        device=device,
    )
    expected_query_start_loc[: num_spec_decodes + 1] = query_start_loc
    expected_num_accepted_tokens = torch.ones(
        batch_size, dtype=torch.int32, device=device
    )
    expected_num_accepted_tokens[:num_spec_decodes] = num_accepted_tokens

    torch.testing.assert_close(staged_state_indices, expected_state_indices)
    torch.testing.assert_close(staged_query_start_loc, expected_query_start_loc)
    torch.testing.assert_close(staged_num_accepted_tokens, expected_num_accepted_tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
def test_aligned_block_table_matches_shared_gdn():
    device = torch.device("cuda")
    seq_lens = torch.tensor(
        [0, 1, 15, 16, 17, 31, 32, 33, 511, 512, 513],
        dtype=torch.int32,
        device=device,
    ).repeat(6)[:65]
    block_table_storage = torch.arange(
        seq_lens.numel() * 128,
        dtype=torch.int32,
        device=device,
    ).reshape(seq_lens.numel(), 128)
    block_table = block_table_storage[:, ::2]
    kv_cache_spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((16, 64),),
        dtypes=(torch.float16,),
        num_speculative_blocks=2,
    )

    expected = mamba_get_block_table_tensor(
        block_table,
        seq_lens,
        kv_cache_spec,
        "align",
    )
    actual = _mamba_get_block_table_tensor(
        block_table,
        seq_lens,
        kv_cache_spec,
        "align",
    )

    torch.testing.assert_close(actual, expected)


def _build_non_spec(batch, is_prefilling, full_cuda_graph=False):
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(
        is_prefilling=None
        if is_prefilling is None
        else torch.tensor(is_prefilling, dtype=torch.bool)
    )
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=0,
        full_cuda_graph=full_cuda_graph,
    )
    return builder, common_attn_metadata, builder.build(0, common_attn_metadata)


def test_one_token_first_chunk_excludes_padding():
    """Neither padding requests nor padding tokens count as prefill work."""
    common = create_common_attn_metadata(
        BatchSpec(seq_lens=[100, 1, 0, 0], query_lens=[1, 1, 0, 0]),
        BLOCK_SIZE,
        DEVICE,
    ).replace(
        is_prefilling=torch.tensor([False, True, False, False], dtype=torch.bool),
        num_actual_tokens=4,
    )
    builder = _make_builder(
        KimiK3KDAMetadataBuilder, num_speculative_tokens=0, full_cuda_graph=False
    )
    actual = builder.build(0, common)

    assert actual.num_decodes == 1
    assert actual.num_prefills == 1
    assert actual.num_decode_tokens == 1
    assert actual.num_prefill_tokens == 1


@pytest.mark.parametrize(
    ("seq_len", "query_len", "is_prefilling", "num_prefills"),
    [
        pytest.param(1, 1, True, 1, id="first-chunk"),
        pytest.param(65, 1, True, 0, id="resumed-chunk"),
        pytest.param(0, 0, True, 0, id="padding"),
        pytest.param(1, 1, None, 0, id="missing-prefill-flag"),
    ],
)
def test_one_token_chunk_classification(
    seq_len, query_len, is_prefilling, num_prefills
):
    """Only a real first chunk with a prefill flag needs state initialization."""
    _, _, actual = _build_non_spec(
        BatchSpec(seq_lens=[100, seq_len], query_lens=[1, query_len]),
        is_prefilling=None if is_prefilling is None else [False, is_prefilling],
    )

    assert actual.num_prefills == num_prefills
    assert actual.num_decodes == 2 - num_prefills
    assert actual.num_prefill_tokens == num_prefills
    assert actual.num_decode_tokens == 1 + query_len - num_prefills
    if num_prefills:
        assert actual.has_initial_state is not None
        assert actual.has_initial_state.tolist() == [True, False]
    else:
        assert actual.has_initial_state is None


def test_cudagraph_capture_batch_stays_decode_only():
    """Capture rows have no history, but must still select decode kernels."""
    batch = BatchSpec(seq_lens=[1] * 4, query_lens=[1] * 4)
    common_attn_metadata = create_common_attn_metadata(
        batch, BLOCK_SIZE, DEVICE
    ).replace(is_prefilling=torch.zeros(4, dtype=torch.bool))
    builder = _make_builder(
        KimiK3KDAMetadataBuilder,
        num_speculative_tokens=0,
        full_cuda_graph=True,
    )
    actual = builder.build_for_cudagraph_capture(common_attn_metadata)

    assert actual.num_prefills == 0
    assert actual.num_decodes == 4
    assert actual.has_initial_state is None
    staged = actual.non_spec_state_indices_tensor
    assert staged is not None
    assert staged.data_ptr() == builder.non_spec_state_indices_tensor.data_ptr()
    torch.testing.assert_close(staged, common_attn_metadata.block_table_tensor[:, 0])


@pytest.mark.skipif(not current_platform.is_cuda(), reason="Kimi-K3 NVIDIA KDA layer")
def test_recoverssm_layer_keeps_records_outside_kv_cache(
    monkeypatch: pytest.MonkeyPatch, default_vllm_config
):
    """A RecoverSSM KDA layer stores the stock conv and SSM state in its Mamba
    pages and its verify records in a buffer with one row per schedulable
    request."""
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_tp_group",
        lambda: SimpleNamespace(world_size=1, rank_in_group=0),
    )
    default_vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    default_vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    default_vllm_config.scheduler_config.max_num_seqs = 5
    default_vllm_config.cache_config.use_replayssm = True
    default_vllm_config.cache_config.use_kda_recoverssm = True
    config = KimiLinearConfig(
        hidden_size=16,
        linear_attn_config={
            "kda_layers": [0],
            "full_attn_layers": [],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
    )
    layer = KimiK3DeltaAttention(
        config, default_vllm_config, prefix="model.layers.0.self_attn"
    )
    # The CuTe kernels need 128-wide heads: this layer runs the Triton ones.
    assert layer.recoverssm_backend == "triton"
    assert len(layer.get_state_shape()) == len(layer.get_state_dtype()) == 2
    records = layer.recoverssm_records
    assert records is not None
    assert records.correction.shape == (5, 4, 3, 32)
    assert records.correction.dtype == torch.float32
    assert records.key_gate.shape == (5, 4, 3, 64)
    assert records.key_gate.dtype == torch.bfloat16
