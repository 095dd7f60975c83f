# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests for MXFP4 linear kernel selection logic (CPU-only).

Run `pytest tests/kernels/quantization/test_mxfp4_kernel_selection.py`.
"""

from unittest.mock import MagicMock, patch

import pytest
import torch

import vllm.envs as envs
from vllm.model_executor.kernels.linear import (
    AiterMxfp4LinearKernel,
    EmulationMxfp4LinearKernel,
    FlashInferMxFp4LinearKernel,
    MarlinMxFp4LinearKernel,
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
    XPUMxFp4LinearKernel,
    init_mxfp4_linear_kernel,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization.utils.mxfp4_utils import (
    quant_dequant_mxfp4,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kMxfp4Dynamic,
    kMxfp6E2M3Dynamic,
    kMxfp6E3M2Dynamic,
)
from vllm.platforms import PlatformEnum

pytestmark = pytest.mark.cpu_test

# Kernels that quantize activations themselves (true W4A4): they require an
# explicit MXFP4-dynamic activation key.
_TRUE_W4A4_KERNELS = [
    FlashInferMxFp4LinearKernel,
    XPUMxFp4LinearKernel,
    AiterMxfp4LinearKernel,
]

# Weight-only (A16) kernels: they never quantize activations. They still accept
# MXFP4 activation keys as an intentional compatibility fallback.
_WEIGHT_ONLY_KERNELS = [MarlinMxFp4LinearKernel]


def _make_emulation_layer():
    layer = torch.nn.Module()
    layer.register_parameter(
        "weight",
        torch.nn.Parameter(torch.ones((2, 2), dtype=torch.uint8), False),
    )
    layer.register_parameter(
        "weight_scale",
        torch.nn.Parameter(torch.ones((2, 1), dtype=torch.uint8), False),
    )
    return layer


def test_can_implement_is_abstract():
    """Test that can_implement()/is_supported() are properly defined."""
    assert hasattr(MxFp4LinearKernel, "can_implement")
    assert hasattr(MxFp4LinearKernel, "is_supported")


@pytest.mark.parametrize("kernel_cls", _TRUE_W4A4_KERNELS)
def test_true_w4a4_kernels_accept_dynamic_mxfp4_activation(kernel_cls):
    config = MxFp4LinearLayerConfig(activation_quant_key=kMxfp4Dynamic)
    can_implement, reason = kernel_cls.can_implement(config)
    assert can_implement, reason


@pytest.mark.parametrize("kernel_cls", _TRUE_W4A4_KERNELS)
def test_true_w4a4_kernels_reject_unset_activation(kernel_cls):
    """None means weight-only/unquantized activations, not dynamic MXFP4."""
    config = MxFp4LinearLayerConfig()
    can_implement, reason = kernel_cls.can_implement(config)
    assert not can_implement
    assert reason


@pytest.mark.parametrize("kernel_cls", _TRUE_W4A4_KERNELS)
def test_true_w4a4_kernels_reject_explicit_non_mxfp4_activation(kernel_cls):
    """FlashInfer/XPU/Aiter quantize activations to MXFP4 internally, so an
    explicit request for a different activation format must be rejected."""
    config = MxFp4LinearLayerConfig(activation_quant_key=kMxfp6E3M2Dynamic)
    can_implement, reason = kernel_cls.can_implement(config)
    assert not can_implement
    assert reason


@pytest.mark.parametrize("kernel_cls", _WEIGHT_ONLY_KERNELS)
@pytest.mark.parametrize("activation_quant_key", [None, kMxfp4Dynamic])
def test_weight_only_kernels_accept_unquantized_or_mxfp4_activation(
    kernel_cls, activation_quant_key
):
    """Marlin/Humming never quantize activations, so an unset activation key,
    or one that already describes MXFP4-shaped data, is tolerated. When an
    activation key is explicitly set, a warning must be logged noting that it
    is ignored, since these kernels are weight-only (A16)."""
    config = MxFp4LinearLayerConfig(activation_quant_key=activation_quant_key)
    with patch(f"{kernel_cls.__module__}.logger.warning_once") as warning_once:
        can_implement, reason = kernel_cls.can_implement(config)
    assert can_implement, reason

    if activation_quant_key is None:
        warning_once.assert_not_called()
    else:
        warning_once.assert_called_once()
        message = warning_once.call_args.args[0]
        assert "the requested activation quantization" in message
        assert "is ignored" in message


@pytest.mark.parametrize("kernel_cls", _WEIGHT_ONLY_KERNELS)
def test_weight_only_kernels_reject_non_mxfp4_activation(kernel_cls):
    config = MxFp4LinearLayerConfig(activation_quant_key=kMxfp6E3M2Dynamic)
    can_implement, reason = kernel_cls.can_implement(config)
    assert not can_implement
    assert reason


@pytest.mark.parametrize(
    "activation_quant_key",
    [None, kMxfp4Dynamic, kMxfp6E3M2Dynamic, kMxfp6E2M3Dynamic],
)
def test_emulation_kernel_accepts_any_config(activation_quant_key, monkeypatch):
    """EmulationMxfp4LinearKernel is the universal fallback: it must accept
    every supported activation format."""
    # `EmulationMxfp4LinearKernel.can_implement` gates on `has_quark()`,
    # which we are not testing here.
    monkeypatch.setattr(
        "vllm.model_executor.kernels.linear.mxfp4.emulation.has_quark",
        lambda: True,
    )
    config = MxFp4LinearLayerConfig(activation_quant_key=activation_quant_key)
    with patch(
        "vllm.model_executor.kernels.linear._get_linear_backend",
        return_value="emulation",
    ):
        can_implement, reason = EmulationMxfp4LinearKernel.can_implement(config)
    assert can_implement, reason


def test_emulation_kernel_derives_quant_dequant_func_from_config(monkeypatch):
    """quant_dequant_func must be derived purely from the config's activation
    QuantKey, not set externally."""
    # `EmulationMxfp4LinearKernel.can_implement` gates on `has_quark()`,
    # which we are not testing here.
    monkeypatch.setattr(
        "vllm.model_executor.kernels.linear.mxfp4.emulation.has_quark",
        lambda: True,
    )
    with patch(
        "vllm.model_executor.kernels.linear._get_linear_backend",
        return_value="emulation",
    ):
        weight_only_config = MxFp4LinearLayerConfig()
        kernel = EmulationMxfp4LinearKernel(weight_only_config)
        x = torch.randn(4)
        # identity for weight-only
        assert torch.equal(kernel.quant_dequant_func(x), x)

        w4a4_config = MxFp4LinearLayerConfig(activation_quant_key=kMxfp4Dynamic)
        kernel = EmulationMxfp4LinearKernel(w4a4_config)
        assert kernel.quant_dequant_func is quant_dequant_mxfp4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulation_kernel_dequantizes_at_load_and_keeps_activation_qdq(
    dtype, monkeypatch
):
    monkeypatch.setattr(
        "vllm.model_executor.kernels.linear.mxfp4.emulation.has_quark",
        lambda: True,
    )
    kernel = EmulationMxfp4LinearKernel(
        MxFp4LinearLayerConfig(activation_quant_key=kMxfp4Dynamic)
    )
    kernel.quant_dequant_func = MagicMock(side_effect=lambda x: x * 0.5)
    layer = _make_emulation_layer()
    dequantized = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    x = torch.tensor([[2.0, 4.0]], dtype=dtype)

    with (
        patch.object(envs, "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", True),
        patch(
            "vllm.model_executor.kernels.linear.mxfp4.emulation.dequant_mxfp4",
            return_value=dequantized,
        ) as dequant,
    ):
        kernel.process_weights_after_loading(layer)
        actual = kernel.apply_weights(layer, x)

    expected = torch.nn.functional.linear(x * 0.5, dequantized.to(dtype))
    torch.testing.assert_close(actual, expected)
    dequant.assert_called_once()
    kernel.quant_dequant_func.assert_called_once_with(x)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.device == dequantized.device
    assert not layer.weight.requires_grad
    assert layer.weight_scale is not None
    assert not layer.weight_scale.requires_grad


def test_emulation_kernel_opt_out_dequantizes_per_invocation(monkeypatch):
    monkeypatch.setattr(
        "vllm.model_executor.kernels.linear.mxfp4.emulation.has_quark",
        lambda: True,
    )
    kernel = EmulationMxfp4LinearKernel(
        MxFp4LinearLayerConfig(activation_quant_key=kMxfp4Dynamic)
    )
    kernel.quant_dequant_func = MagicMock(side_effect=lambda x: x * 0.5)
    layer = _make_emulation_layer()
    dequantized = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    x = torch.tensor([[2.0, 4.0]], dtype=torch.bfloat16)

    with (
        patch.object(envs, "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", False),
        patch(
            "vllm.model_executor.kernels.linear.mxfp4.emulation.dequant_mxfp4",
            return_value=dequantized,
        ) as dequant,
    ):
        kernel.process_weights_after_loading(layer)
        dequant.assert_not_called()
        first = kernel.apply_weights(layer, x)
        second = kernel.apply_weights(layer, x)

    expected = torch.nn.functional.linear(x * 0.5, dequantized)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
    assert dequant.call_count == 2
    assert kernel.quant_dequant_func.call_count == 2
    assert layer.weight.dtype == torch.uint8
    assert layer.weight_scale is not None


def test_aiter_kernel_is_supported_requires_native_mx_support():
    """AiterMxfp4LinearKernel must not be selected on platforms without
    native MX compute, even if AITER itself is importable."""
    with patch(
        "vllm.model_executor.kernels.linear.mxfp4.aiter.current_platform.supports_mx",
        return_value=False,
    ):
        is_supported, reason = AiterMxfp4LinearKernel.is_supported()
    assert not is_supported
    assert reason


class OOTMxFp4LinearKernel(MxFp4LinearKernel):
    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pass


@patch("vllm.model_executor.kernels.linear.current_platform")
def test_init_mxfp4_linear_kernel_dispatches_to_registered_kernel(platform_mock):
    """init_mxfp4_linear_kernel should select a registered kernel that
    reports itself as supported, and construct it with a fresh config."""
    platform_mock._enum = PlatformEnum.OOT
    register_linear_kernel(OOTMxFp4LinearKernel, PlatformEnum.OOT, "mxfp4")

    kernel = init_mxfp4_linear_kernel(activation_quant_key=kMxfp4Dynamic)

    assert isinstance(kernel, OOTMxFp4LinearKernel)
    assert kernel.config == MxFp4LinearLayerConfig(activation_quant_key=kMxfp4Dynamic)


class UnsupportedMxFp4LinearKernel(MxFp4LinearKernel):
    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        return False, "never supported"

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pass


@patch("vllm.model_executor.kernels.linear.current_platform")
def test_init_mxfp4_linear_kernel_raises_when_no_kernel_matches(platform_mock):
    platform_mock._enum = PlatformEnum.UNSPECIFIED
    register_linear_kernel(
        UnsupportedMxFp4LinearKernel, PlatformEnum.UNSPECIFIED, "mxfp4"
    )

    with pytest.raises(ValueError, match="Failed to find a kernel"):
        init_mxfp4_linear_kernel()
