# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests for FusedMoEFactory weight loading with padded hidden dimensions.

When using DeepEP backends or NIXL EP with models like nemotron_h,
hidden_size may be rounded up (e.g., 2688 -> 3072) for backend requirements.
Weight parameters are created with the padded size, but checkpoint weights
have the original unpadded size. These tests verify that weight loading
correctly handles this mismatch.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from .utils import make_dummy_moe_config


class TestGetHiddenDim:
    """Unit tests for _get_hidden_dim."""

    def test_2d_non_transposed_w2(self):
        # w2: shard_dim=1 (intermediate), hidden=0
        assert RoutedExperts._get_hidden_dim(shard_dim=1, ndim=2) == 0

    def test_2d_non_transposed_w13(self):
        # w1/w3: shard_dim=0 (intermediate), hidden=1
        assert RoutedExperts._get_hidden_dim(shard_dim=0, ndim=2) == 1

    def test_2d_transposed_w2(self):
        # transposed w2: shard_dim=0, hidden=1
        assert RoutedExperts._get_hidden_dim(shard_dim=0, ndim=2) == 1

    def test_2d_transposed_w13(self):
        # transposed w1/w3: shard_dim=1, hidden=0
        assert RoutedExperts._get_hidden_dim(shard_dim=1, ndim=2) == 0

    def test_3d_non_transposed_w2(self):
        # 3D w2: shard_dim=2, hidden=1
        assert RoutedExperts._get_hidden_dim(shard_dim=2, ndim=3) == 1

    def test_3d_non_transposed_w13(self):
        # 3D w1/w3: shard_dim=1, hidden=2
        assert RoutedExperts._get_hidden_dim(shard_dim=1, ndim=3) == 2

    def test_3d_transposed_w2(self):
        # transposed 3D w2: shard_dim=1, hidden=2
        assert RoutedExperts._get_hidden_dim(shard_dim=1, ndim=3) == 2

    def test_3d_transposed_w13(self):
        # transposed 3D w1/w3: shard_dim=2, hidden=1
        assert RoutedExperts._get_hidden_dim(shard_dim=2, ndim=3) == 1

    def test_1d_returns_zero(self):
        # 1D per-channel scales: always returns 0
        assert RoutedExperts._get_hidden_dim(shard_dim=0, ndim=1) == 0
        assert RoutedExperts._get_hidden_dim(shard_dim=1, ndim=1) == 0

    def test_invalid_shard_dim_raises(self):
        # shard_dim outside the data dimensions should raise
        with pytest.raises(ValueError, match="not a valid data dimension"):
            RoutedExperts._get_hidden_dim(shard_dim=0, ndim=3)


class TestOrientFusedWeight:
    """Unit tests for _orient_fused_weight.

    E=8 experts, hidden=3072, intermediate=1024.
    """

    HIDDEN = 3072

    def test_w13_standard_orientation_is_untouched(self):
        weight = torch.randn(8, 2048, self.HIDDEN)
        result = RoutedExperts._orient_fused_weight(weight, False)
        assert result.shape == (8, 2048, self.HIDDEN)

    def test_w13_transposed_checkpoint_is_normalised(self):
        # e.g. Qwen3 VL MoE stores [experts, hidden, 2 * intermediate]
        weight = torch.randn(8, self.HIDDEN, 2048)
        result = RoutedExperts._orient_fused_weight(weight, True)
        assert result.shape == (8, 2048, self.HIDDEN)

    def test_w2_standard_orientation_is_untouched(self):
        weight = torch.randn(8, self.HIDDEN, 1024)
        result = RoutedExperts._orient_fused_weight(weight, False)
        assert result.shape == (8, self.HIDDEN, 1024)

    def test_w2_transposed_checkpoint_is_normalised(self):
        weight = torch.randn(8, 1024, self.HIDDEN)
        result = RoutedExperts._orient_fused_weight(weight, True)
        assert result.shape == (8, self.HIDDEN, 1024)

    def test_w13_per_channel_scale_is_untouched(self):
        # A fused per-channel scale has no hidden dim, so transposing it would
        # leave chunk()/TP sharding operating on the wrong axis.
        scale = torch.randn(8, 2048, 1)
        result = RoutedExperts._orient_fused_weight(scale, False)
        assert result.shape == (8, 2048, 1)
        assert result.chunk(2, dim=1)[0].shape == (8, 1024, 1)

    def test_w2_per_channel_scale_is_untouched(self):
        scale = torch.randn(8, self.HIDDEN, 1)
        result = RoutedExperts._orient_fused_weight(scale, False)
        assert result.shape == (8, self.HIDDEN, 1)

    def test_block_scale_is_untouched(self):
        # Block scales are [experts, 2 * intermediate / block, hidden / block]
        scale = torch.randn(8, 16, 24)
        result = RoutedExperts._orient_fused_weight(scale, False)
        assert result.shape == (8, 16, 24)
        assert result.data_ptr() == scale.data_ptr()

    @pytest.mark.parametrize(
        "checkpoint_shape",
        [
            # Qwen3-VL stores block scales in checkpoint weight orientation.
            (8, 16, 12),
            (8, 6, 16),
            (8, 16, 16),
        ],
    )
    def test_qwen3_vl_transposed_block_scale_uses_explicit_layout(
        self,
        checkpoint_shape: tuple[int, ...],
    ):
        scale = torch.arange(torch.tensor(checkpoint_shape).prod()).reshape(
            checkpoint_shape
        )
        result = RoutedExperts._orient_fused_weight(scale, True)
        torch.testing.assert_close(result, scale.transpose(-1, -2))


class TestNarrowExpertDataForPadding:
    """Unit tests for _narrow_expert_data_for_padding."""

    def test_no_narrowing_when_shapes_match(self):
        expert_data = torch.zeros(1024, 1024)
        loaded_weight = torch.randn(1024, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        assert result.shape == loaded_weight.shape
        assert result.data_ptr() == expert_data.data_ptr()

    def test_narrow_w2_hidden_dim(self):
        # w2: (hidden_size, intermediate_size) - hidden_size padded at dim 0
        expert_data = torch.zeros(3072, 1024)
        loaded_weight = torch.randn(2688, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        assert result.shape == (2688, 1024)

    def test_narrow_w13_hidden_dim(self):
        # w1/w3: (intermediate_size, hidden_size) - hidden_size padded at dim 1
        expert_data = torch.zeros(2048, 3072)
        loaded_weight = torch.randn(2048, 2688)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=1
        )
        assert result.shape == (2048, 2688)

    def test_narrow_transposed_w2(self):
        # transposed w2: (intermediate_size, hidden_size) - hidden at dim 1
        expert_data = torch.zeros(1024, 3072)
        loaded_weight = torch.randn(1024, 2688)
        hidden_dim = RoutedExperts._get_hidden_dim(shard_dim=0, ndim=2)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=hidden_dim
        )
        assert result.shape == (1024, 2688)

    def test_narrow_3d_full_load(self):
        # 3D tensor for full_load path: w2 (num_experts, hidden_size, intermediate)
        expert_data = torch.zeros(8, 3072, 1024)
        loaded_weight = torch.randn(8, 2688, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=1
        )
        assert result.shape == (8, 2688, 1024)

    def test_narrow_1d_scale(self):
        # 1D scale tensor: per-channel w2 scale (hidden_size,)
        expert_data = torch.zeros(3072)
        loaded_weight = torch.randn(2688)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        assert result.shape == (2688,)

    def test_scalar_weight_no_op(self):
        # 0-dim tensor should be a no-op
        expert_data = torch.zeros(3072)
        loaded_weight = torch.tensor(1.0)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        # ndim == 0, so no narrowing
        assert result.shape == (3072,)

    def test_no_narrowing_when_loaded_weight_larger(self):
        # Guard: don't narrow if loaded_weight is larger than expert_data
        expert_data = torch.zeros(2688, 1024)
        loaded_weight = torch.randn(3072, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        assert result.shape == (2688, 1024)
        assert result.data_ptr() == expert_data.data_ptr()

    def test_negative_hidden_dim_is_noop(self):
        # Negative hidden_dim should be a safe no-op (0 <= check)
        expert_data = torch.zeros(3072, 1024)
        loaded_weight = torch.randn(2688, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=-1
        )
        # -1 fails the 0 <= check, so no narrowing
        assert result.shape == (3072, 1024)
        assert result.data_ptr() == expert_data.data_ptr()

    def test_only_narrows_hidden_dim(self):
        # Verify that only the specified hidden_dim is narrowed,
        # even when other dimensions also differ
        expert_data = torch.zeros(3072, 2048)
        loaded_weight = torch.randn(2688, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        # Only dim 0 (hidden) should be narrowed; dim 1 stays at 2048
        assert result.shape == (2688, 2048)

    def test_narrowed_data_shares_storage(self):
        # Verify narrowing returns a view (writes go to original tensor)
        expert_data = torch.zeros(3072, 1024)
        loaded_weight = torch.randn(2688, 1024)
        result = RoutedExperts._narrow_expert_data_for_padding(
            expert_data, loaded_weight, hidden_dim=0
        )
        result.copy_(loaded_weight)
        # The first 2688 rows of expert_data should now have loaded_weight
        assert torch.equal(expert_data[:2688, :], loaded_weight)
        # Padded region should remain zero
        assert torch.equal(expert_data[2688:, :], torch.zeros(3072 - 2688, 1024))


class TestWeightLoadingWithPaddedHiddenSize:
    """Integration-style tests that simulate padded weight loading."""

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("tp_rank", [0, 1])
    def test_load_w2_chunks_noncontiguous_cpu_source_to_padded_cuda(
        self, dtype, tp_rank
    ):
        hidden = 4096
        intermediate = 1024
        loaded_weight = (
            torch.arange(hidden * intermediate * 2)
            .remainder(251)
            .to(dtype)
            .reshape(hidden, intermediate * 2)
        )
        tp_source = loaded_weight[
            :, intermediate * tp_rank : intermediate * (tp_rank + 1)
        ]
        expert_data_full = torch.zeros(
            hidden + 8, intermediate + 8, device="cuda", dtype=dtype
        )
        destination = expert_data_full[:hidden, :intermediate]

        assert not tp_source.is_contiguous()
        assert tp_source.nbytes > 1 << 20
        assert not destination.is_contiguous()

        experts = object.__new__(RoutedExperts)
        torch.nn.Module.__init__(experts)
        experts.moe_config = make_dummy_moe_config()
        experts.moe_config.moe_parallel_config.tp_size = 2

        torch.accelerator.synchronize()
        allocated_before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        experts._load_w2(
            expert_data=expert_data_full,
            shard_dim=1,
            loaded_weight=loaded_weight,
            tp_rank=tp_rank,
        )
        torch.accelerator.synchronize()
        peak_extra = torch.accelerator.max_memory_allocated() - allocated_before

        # A single copy into the strided CUDA view allocates a full-shard
        # temporary. Correct values alone would not catch that regression.
        assert peak_extra < tp_source.nbytes

        torch.testing.assert_close(destination.cpu(), tp_source)
        assert torch.count_nonzero(expert_data_full[hidden:, :]) == 0
        assert torch.count_nonzero(expert_data_full[:hidden, intermediate:]) == 0

    def test_load_w2_with_padding(self):
        """Simulate loading w2 weights when hidden_size is padded."""
        padded_hidden = 3072
        original_hidden = 2688
        intermediate = 1024

        expert_data_full = torch.zeros(padded_hidden, intermediate)
        loaded_weight = torch.randn(original_hidden, intermediate)

        # w2 non-transposed: shard_dim=1, hidden_dim=0
        hidden_dim = RoutedExperts._get_hidden_dim(shard_dim=1, ndim=2)
        expert_data = RoutedExperts._narrow_expert_data_for_padding(
            expert_data_full, loaded_weight, hidden_dim=hidden_dim
        )
        expert_data.copy_(loaded_weight)

        assert torch.equal(expert_data_full[:original_hidden, :], loaded_weight)
        assert torch.equal(
            expert_data_full[original_hidden:, :],
            torch.zeros(padded_hidden - original_hidden, intermediate),
        )

    def test_load_w13_with_padding(self):
        """Simulate loading w1/w3 weights when hidden_size is padded."""
        padded_hidden = 3072
        original_hidden = 2688
        intermediate = 1024

        # w1/w3: (intermediate_size, hidden_size)
        expert_data_full = torch.zeros(intermediate, padded_hidden)
        loaded_weight = torch.randn(intermediate, original_hidden)

        # w1 non-transposed: shard_dim=0, hidden_dim=1
        hidden_dim = RoutedExperts._get_hidden_dim(shard_dim=0, ndim=2)
        expert_data = RoutedExperts._narrow_expert_data_for_padding(
            expert_data_full, loaded_weight, hidden_dim=hidden_dim
        )
        expert_data.copy_(loaded_weight)

        assert torch.equal(expert_data_full[:, :original_hidden], loaded_weight)
        assert torch.equal(
            expert_data_full[:, original_hidden:],
            torch.zeros(intermediate, padded_hidden - original_hidden),
        )

    def test_load_transposed_w2_with_padding(self):
        """Simulate loading transposed w2 (GPTQ) with padded hidden_size."""
        padded_hidden = 3072
        original_hidden = 2688
        intermediate = 1024

        # transposed w2: (intermediate_size, hidden_size), shard_dim=0
        expert_data_full = torch.zeros(intermediate, padded_hidden)
        loaded_weight = torch.randn(intermediate, original_hidden)

        hidden_dim = RoutedExperts._get_hidden_dim(shard_dim=0, ndim=2)
        expert_data = RoutedExperts._narrow_expert_data_for_padding(
            expert_data_full, loaded_weight, hidden_dim=hidden_dim
        )
        expert_data.copy_(loaded_weight)

        assert torch.equal(expert_data_full[:, :original_hidden], loaded_weight)

    def test_no_padding_is_noop(self):
        """Verify that when sizes match, behavior is unchanged."""
        hidden = 2048
        intermediate = 1024

        expert_data_full = torch.zeros(hidden, intermediate)
        loaded_weight = torch.randn(hidden, intermediate)

        hidden_dim = RoutedExperts._get_hidden_dim(shard_dim=1, ndim=2)
        expert_data = RoutedExperts._narrow_expert_data_for_padding(
            expert_data_full, loaded_weight, hidden_dim=hidden_dim
        )
        expert_data.copy_(loaded_weight)

        assert torch.equal(expert_data_full, loaded_weight)

    def test_narrow_shard_dim(self):
        """Simulate loading w2 when both hidden_size and intermediate_size
        are padded.
        """
        padded_hidden = 3072
        original_hidden = 2688
        padded_intermediate = 1024
        original_intermediate = 896

        expert_data_full = torch.zeros(padded_hidden, padded_intermediate)
        loaded_weight = torch.randn(original_hidden, original_intermediate)

        shard_dim = 1
        hidden_dim = RoutedExperts._get_hidden_dim(shard_dim=shard_dim, ndim=2)
        expert_data = RoutedExperts._narrow_expert_data_for_padding(
            expert_data_full,
            loaded_weight,
            hidden_dim=hidden_dim,
            shard_dim=shard_dim,
        )
        expert_data.copy_(loaded_weight)

        assert torch.equal(
            expert_data_full[:original_hidden, :original_intermediate],
            loaded_weight,
        )
        assert torch.equal(
            expert_data_full[original_hidden:, :],
            torch.zeros(padded_hidden - original_hidden, padded_intermediate),
        )
        assert torch.equal(
            expert_data_full[:original_hidden, original_intermediate:],
            torch.zeros(original_hidden, padded_intermediate - original_intermediate),
        )


class TestUnquantizedTrtLlmPrePadding:
    @staticmethod
    def _make_method(
        intermediate: int,
        backend: UnquantizedMoeBackend = UnquantizedMoeBackend.FLASHINFER_TRTLLM,
    ) -> UnquantizedFusedMoEMethod:
        moe_config = make_dummy_moe_config(
            num_experts=2,
            hidden_dim=64,
            intermediate_size=intermediate,
        )
        method = object.__new__(UnquantizedFusedMoEMethod)
        method.moe = moe_config
        method.unquantized_backend = backend
        method.moe_kernel = None
        return method

    @pytest.mark.parametrize(
        "backend,original,expected",
        [
            (UnquantizedMoeBackend.FLASHINFER_TRTLLM, 1344, 1408),
            (UnquantizedMoeBackend.FLASHINFER_TRTLLM, 1408, 1408),
            (UnquantizedMoeBackend.TRITON, 1344, 1344),
        ],
    )
    def test_rounds_intermediate_before_weight_allocation(
        self,
        backend: UnquantizedMoeBackend,
        original: int,
        expected: int,
    ):
        method = self._make_method(original, backend)

        hidden, intermediate = method.maybe_roundup_sizes(
            hidden_size=64,
            intermediate_size_per_partition=original,
            act_dtype=torch.bfloat16,
            moe_parallel_config=method.moe.moe_parallel_config,
        )

        assert hidden == 64
        assert intermediate == expected


class TestLoadWeightsExpertBias:
    """Some quantized exports (e.g. GPTQ, llm-compressor NVFP4) materialize
    all-zero per-expert `.bias` tensors for models whose experts have no bias
    params. `RoutedExperts.load_weights` needs to ignore them like
    `AutoWeightsLoader` does, instead of raising AttributeError for the
    nonexistent `w13_bias`/`w2_bias` params.
    """

    NUM_EXPERTS = 2

    def _make_experts(self, has_bias: bool) -> torch.nn.Module:
        experts = torch.nn.Module()
        experts.layer_name = "model.layers.0.mlp.experts"
        experts.moe_config = make_dummy_moe_config(num_experts=self.NUM_EXPERTS)
        mapping = RoutedExperts.build_expert_params_mapping(
            "gate_proj",
            "down_proj",
            "up_proj",
            num_experts=self.NUM_EXPERTS,
            routed_experts_prefix="",
            include_fused=True,
        )
        experts.get_expert_mapping = lambda **_: mapping

        def weight_loader(**_):
            return True

        names = ["w13_weight", "w2_weight"]
        if has_bias:
            names += ["w13_bias", "w2_bias"]
        for name in names:
            param = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
            param.weight_loader = weight_loader
            setattr(experts, name, param)
        return experts

    def _checkpoint_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{expert_id}.{proj}.{suffix}", torch.zeros(1, 1))
            for expert_id in range(self.NUM_EXPERTS)
            for proj in ("gate_proj", "up_proj", "down_proj")
            for suffix in ("weight", "bias")
        ]

    def test_bias_free_experts_ignore_checkpoint_biases(self):
        experts = self._make_experts(has_bias=False)
        loaded = list(RoutedExperts.load_weights(experts, self._checkpoint_weights()))
        assert set(loaded) == {"w13_weight", "w2_weight"}

    def test_experts_with_bias_params_load_checkpoint_biases(self):
        experts = self._make_experts(has_bias=True)
        loaded = list(RoutedExperts.load_weights(experts, self._checkpoint_weights()))
        assert set(loaded) == {"w13_weight", "w2_weight", "w13_bias", "w2_bias"}

    def test_missing_non_bias_param_names_the_weight(self):
        experts = self._make_experts(has_bias=False)
        weights = [("0.down_proj.new_scale", torch.zeros(1, 1))]
        with pytest.raises(AttributeError, match="w2_new_scale"):
            list(RoutedExperts.load_weights(experts, weights))

    @pytest.mark.parametrize(
        "expert_name,param_name",
        [
            # Pre-fused checkpoints name biases `<proj>_bias` (gpt-oss) or
            # `<proj>.bias` (quark), neither of which rewrites to a real param.
            # Skipping them would silently drop a bias the layer does have, so
            # they must raise; models rename them via WeightsMapper instead.
            ("down_proj_bias", "w2_weight_bias"),
            ("gate_up_proj_bias", "w13_weight_bias"),
            ("down_proj.bias", "w2_weight.bias"),
        ],
    )
    def test_fused_bias_names_are_not_skipped(self, expert_name, param_name):
        experts = self._make_experts(has_bias=True)
        weights = [(expert_name, torch.zeros(self.NUM_EXPERTS, 1))]
        with pytest.raises(AttributeError, match=param_name.replace(".", r"\.")):
            list(RoutedExperts.load_weights(experts, weights))


class TestLoadWeightsExpertMapping:
    @staticmethod
    def _mapping(
        projs: tuple[str, str, str | None] = ("gate_proj", "down_proj", "up_proj"),
        **kwargs,
    ):
        return RoutedExperts.build_expert_params_mapping(
            *projs,
            num_experts=16,
            routed_experts_prefix="",
            include_fused=True,
            **kwargs,
        )

    @staticmethod
    def _load(
        mapping,
        weights,
        suffix="weight",
        *,
        transposed=False,
        quant_method="tensor",
        layer_name="model.layers.0.mlp.experts",
        is_gated=True,
    ):
        experts = torch.nn.Module()
        experts.layer_name = layer_name
        experts.moe_config = SimpleNamespace(is_act_and_mul=is_gated)
        experts.get_expert_mapping = lambda **_: mapping
        experts.is_fused_checkpoint_transposed = transposed
        experts._orient_fused_weight = RoutedExperts._orient_fused_weight
        calls = []

        def weight_loader(param, loaded_weight, shard_id, expert_id, **_):
            calls.append((param.test_name, shard_id, expert_id, loaded_weight.clone()))
            return True

        for prefix in ("w13", "w2"):
            param_name = f"{prefix}_{suffix}"
            param = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            param.test_name = param_name
            param.quant_method = quant_method
            param.weight_loader = weight_loader
            setattr(experts, param_name, param)
        loaded = list(RoutedExperts.load_weights(experts, iter(weights)))
        assert loaded == [call[0] for call in calls]
        return calls

    @pytest.mark.parametrize(
        "projs,lora_prefix",
        [
            (("gate_proj", "down_proj", "up_proj"), ""),
            (("w1", "w2", "w3"), ""),
            (("up_proj", "down_proj", "up_proj"), ""),
            (("up_proj", "down_proj", None), ""),
            (("gate_proj", "down_proj", "up_proj"), "base_layer."),
        ],
    )
    @pytest.mark.parametrize(
        "suffix,shape,dtype",
        [
            ("weight", (2, 3), torch.bfloat16),
            ("input_scale", (), torch.float32),
            ("g_idx", (2,), torch.int32),
        ],
    )
    def test_per_expert_weights_keep_all_physical_destinations(
        self, projs, lora_prefix, suffix, shape, dtype
    ):
        mapping = self._mapping(
            projs,
            num_redundant_experts=4,
            lora_base_layer_prefix=lora_prefix,
            is_gated=projs[2] is not None,
        )
        for logical_id, physical_ids in [(1, (1, 17)), (10, (10,))]:
            for proj in dict.fromkeys(projs):
                if not proj:
                    continue
                weight = torch.full(shape, logical_id + 1, dtype=dtype)
                name = f"{logical_id}.{proj}.{lora_prefix}{suffix}"
                calls = self._load(mapping, [(name, weight)], suffix)
                shards = [s for p, s in zip(projs, ("w1", "w2", "w3")) if p == proj]
                expected = [
                    (f"{'w2' if shard == 'w2' else 'w13'}_{suffix}", shard, physical)
                    for physical in physical_ids
                    for shard in shards
                ]
                assert [call[:3] for call in calls] == expected
                for call in calls:
                    torch.testing.assert_close(call[3], weight, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "projs,fused_name,lora_prefix",
        [
            (("gate_proj", "down_proj", "up_proj"), "gate_up_proj", ""),
            (("w1", "w2", "w3"), "w13", "base_layer."),
        ],
    )
    def test_per_expert_fused_gate_up_keeps_both_halves(
        self, projs, fused_name, lora_prefix
    ):
        mapping = self._mapping(
            projs, num_redundant_experts=4, lora_base_layer_prefix=lora_prefix
        )
        weight = torch.arange(12).reshape(4, 3)
        calls = self._load(mapping, [(f"1.{fused_name}.{lora_prefix}weight", weight)])
        assert [call[:3] for call in calls] == [
            ("w13_weight", shard, expert)
            for expert in (1, 17)
            for shard in ("w1", "w3")
        ]
        for call, expected in zip(calls, weight.chunk(2) * 2):
            torch.testing.assert_close(call[3], expected, rtol=0, atol=0)

    def test_non_gated_mapping_uses_stacked_up_proj_without_warning(self, caplog_vllm):
        mapping = self._mapping(("up_proj", "down_proj", None), is_gated=False)
        assert "Unexpected gate/up projection names" not in caplog_vllm.text
        assert mapping[:2] == [
            ("experts.w13_weight", "experts.up_proj", 0, "w1"),
            ("experts.w2_weight", "experts.down_proj", 0, "w2"),
        ]
        assert mapping[2:] == [
            (param, f"experts.{expert}.{proj}.", expert, shard)
            for expert in range(16)
            for param, proj, shard in (
                ("experts.w13_", "up_proj", "w1"),
                ("experts.w2_", "down_proj", "w2"),
            )
        ]

    def test_gated_mapping_with_unknown_names_warns_and_skips_fused(self, caplog_vllm):
        mapping = self._mapping(("fc1", "fc2", "fc3"))
        assert "Unexpected gate/up projection names: fc1, fc3" in caplog_vllm.text
        assert [name for _, name, _, _ in mapping[:3]] == [
            "experts.0.fc1.",
            "experts.0.fc2.",
            "experts.0.fc3.",
        ]

    def test_stacked_non_gated_tensors_load_unsplit(self):
        mapping = self._mapping(("up_proj", "down_proj", None), is_gated=False)
        up_proj = torch.arange(16 * 4 * 3).reshape(16, 4, 3)
        down_proj = torch.arange(16 * 3 * 4).reshape(16, 3, 4)
        calls = self._load(
            mapping,
            [("up_proj", up_proj), ("down_proj", down_proj)],
            is_gated=False,
        )
        assert [call[:3] for call in calls] == [
            *(("w13_weight", "w1", expert) for expert in range(16)),
            *(("w2_weight", "w2", expert) for expert in range(16)),
        ]
        for call, expected in zip(calls, [*up_proj, *down_proj]):
            torch.testing.assert_close(call[3], expected, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "suffix,quant_method,transposed",
        [
            ("weight", "tensor", False),
            ("weight", "tensor", True),
            ("weight_scale", "channel", True),
            ("weight_scale", "block", True),
        ],
    )
    def test_mixed_weights_reset_mapping_and_keep_fused_layout(
        self, transposed, suffix, quant_method
    ):
        weight = torch.arange(192).reshape(16, 4, 3)
        checkpoint = (
            weight.transpose(-1, -2)
            if (transposed and (suffix == "weight" or quant_method == "block"))
            else weight
        )
        calls = self._load(
            self._mapping(),
            [
                (f"1.gate_proj.{suffix}", weight[1, :2]),
                ("gate_up_proj" + suffix[6:], checkpoint),
                (f"10.down_proj.{suffix}", weight[10, :2]),
            ],
            suffix,
            transposed=transposed,
            quant_method=quant_method,
        )
        fused_calls = [
            (f"w13_{suffix}", shard, expert)
            for shard in ("w1", "w3")
            for expert in range(16)
        ]
        assert [call[:3] for call in calls] == [
            (f"w13_{suffix}", "w1", 1),
            *fused_calls,
            (f"w2_{suffix}", "w2", 10),
        ]
        expected = [weight[1, :2]]
        expected += [expert for half in weight.chunk(2, dim=1) for expert in half]
        expected += [weight[10, :2]]
        for call, tensor in zip(calls, expected):
            torch.testing.assert_close(call[3], tensor, rtol=0, atol=0)

    def test_fused_weights_stop_after_first_matching_run(self):
        mapping = self._mapping()
        calls = self._load(
            [mapping[0], mapping[2], mapping[1]],
            [("gate_up_proj", torch.ones(2, 4, 3))],
        )
        assert [call[:3] for call in calls] == [
            ("w13_weight", "w1", 0),
            ("w13_weight", "w1", 1),
        ]

    def test_repeated_experts_prefix_does_not_hide_later_matches(self):
        calls = self._load(
            self._mapping(),
            [("1.gate_proj.weight", torch.ones(2, 3))],
            layer_name="model.experts.0.child.experts",
        )
        assert [call[:3] for call in calls] == [("w13_weight", "w1", 1)]

    @pytest.mark.parametrize(
        "name",
        [
            "01.gate_proj.weight",
            "16.gate_proj.weight",
            "gate.weight",
            "non_expert.weight",
        ],
    )
    def test_unmatched_names_do_not_load_experts(self, name):
        assert self._load(self._mapping(), [(name, torch.ones(2, 3))]) == []

    @pytest.mark.parametrize(
        "weight_name", ["1.gate_proj.", "experts.", "experts.1", ""]
    )
    def test_unusual_matching_entries_are_not_silently_skipped(self, weight_name):
        mapping = self._mapping() + [("missing", weight_name, 1, "w3")]
        with pytest.raises(AttributeError, match="has no parameter"):
            self._load(mapping, [("1.gate_proj.weight", torch.ones(2, 3))])


class TestPerTensorScaleCoercion:
    """Regression test for shape-(1,) per-tensor scales (issue #43297).

    llm-compressor NVFP4 emits per-tensor weight and input scales as
    shape-(1,) tensors. `_to_scalar` collapses them to a 0-D scalar so the
    scalar-slot assignments in the weight loader neither broadcast nor raise.
    """

    def test_collapses_to_scalar(self):
        # shape-(1,) and 0-D both reduce to a 0-D scalar.
        for loaded_weight in (torch.tensor([0.5]), torch.tensor(0.5)):
            scalar = RoutedExperts._to_scalar(loaded_weight)
            assert scalar.shape == ()
            assert scalar.item() == pytest.approx(0.5)

    def test_rejects_non_scalar(self):
        # numel > 1 must fail loudly instead of silently picking an element.
        with pytest.raises(RuntimeError):
            RoutedExperts._to_scalar(torch.tensor([0.1, 0.2]))
