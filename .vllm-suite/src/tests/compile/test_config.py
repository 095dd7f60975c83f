# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import copy
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from pydantic import ValidationError

from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import (
    FixFunctionalizationPass,
)
from vllm.config import (
    CompilationConfig,
    CUDAGraphMode,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.compilation import CompilationMode, PassConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import (
    _is_torch_equal_or_newer,
    is_torch_equal,
)
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

# This import automatically registers `torch.ops.silly.attention`
from . import silly_attention  # noqa: F401

DEVICE_TYPE = current_platform.device_type


def test_version():
    # Test the version comparison logic using the private function
    assert _is_torch_equal_or_newer("2.8.0.dev20250624+cu128", "2.8.0.dev")
    assert _is_torch_equal_or_newer("2.8.0a0+gitc82a174", "2.8.0.dev")
    assert _is_torch_equal_or_newer("2.8.0", "2.8.0.dev")
    assert _is_torch_equal_or_newer("2.8.1", "2.8.0.dev")
    assert not _is_torch_equal_or_newer("2.7.1", "2.8.0.dev")


def test_get_raw_stream_patch():
    """Test that get_raw_stream patch is applied only for torch 2.9.0 or 2.9.1."""
    import builtins

    # Check if get_raw_stream exists in builtins
    has_patch = hasattr(builtins, "get_raw_stream")

    # Import torch to get actual version

    is_torch_2_9 = is_torch_equal("2.9.0") or is_torch_equal("2.9.1")

    if is_torch_2_9:
        # For torch 2.9.x, the patch should be applied
        assert has_patch, "get_raw_stream should be patched for torch 2.9.x"
        # Verify it's callable (it should be the _cuda_getCurrentRawStream function)
        get_raw_stream = builtins.get_raw_stream  # type: ignore[attr-defined]
        assert callable(get_raw_stream)
        # Verify it's the correct function from torch._C
        from torch._C import _cuda_getCurrentRawStream

        assert get_raw_stream is _cuda_getCurrentRawStream


# Inductor can initialize CUDA even for CPU inputs.
@pytest.mark.forked
@pytest.mark.parametrize("use_v2", [False, True])
def test_e8m0_custom_op_fullgraph(use_v2, use_fresh_inductor_cache):
    """E8M0 inputs must not prevent mutable custom-op decomposition."""
    with torch.library._scoped_library("test_e8m0", "FRAGMENT") as lib:
        lib.define("scale_(Tensor(a!) out, Tensor scale) -> ()")

        @torch.library.impl(lib, "scale_", "CPU")
        def scale_impl(out, scale):
            out.mul_(scale.float())

        @torch.library.register_fake("test_e8m0::scale_", lib=lib)
        def scale_fake(out, scale):
            return None

        def forward(x, scale):
            out = x.clone()
            torch.ops.test_e8m0.scale_(out, scale)
            return out

        x = torch.randn(4, 4)
        scale = torch.full((4,), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        compiled = torch.compile(
            forward,
            fullgraph=True,
            options={"enable_auto_functionalized_v2": use_v2},
        )
        torch.testing.assert_close(compiled(x, scale), x * 2)


def test_copy_pass():
    vllm_config = VllmConfig()
    inductor_pass = FixFunctionalizationPass(vllm_config)
    copied_inductor_pass = copy.deepcopy(inductor_pass)
    assert (
        copied_inductor_pass.compilation_config.use_inductor_graph_partition
        == vllm_config.compilation_config.use_inductor_graph_partition
    )
    assert (
        copied_inductor_pass.compilation_config.splitting_ops
        == vllm_config.compilation_config.splitting_ops
    )


def test_custom_op():
    # proper syntax
    _ = CompilationConfig(custom_ops=["+quant_fp8", "-silu_and_mul"])
    _ = CompilationConfig(custom_ops=["none", "+rms_norm"])
    _ = CompilationConfig(custom_ops=["+rms_norm", "+rms_norm"])

    for custom_ops in (["quant_fp8"], ["+"], ["-"]):
        with pytest.raises(ValueError, match="Invalid syntax '"):
            CompilationConfig(custom_ops=custom_ops)


@pytest.mark.parametrize(
    ("custom_ops", "config_kwargs", "match"),
    [
        (["all", "none"], {}, "can contain only one base mode"),
        (
            ["none", "+rms_norm", "-rms_norm"],
            {},
            "cannot both enable and disable.*rms_norm",
        ),
        (
            ["-rotary_embedding"],
            {"pass_config": PassConfig(enable_qk_norm_rope_fusion=True)},
            "cannot both enable and disable.*rotary_embedding",
        ),
    ],
)
def test_reject_contradictory_custom_ops(custom_ops, config_kwargs, match):
    with pytest.raises(ValueError, match=match):
        CompilationConfig(custom_ops=custom_ops, **config_kwargs)


# forked needed to workaround https://github.com/vllm-project/vllm/issues/21073
@pytest.mark.forked
# NB: We don't test VLLM_DISABLE_COMPILE_CACHE=0 because that depends
# on the state of the cache directory on the current machine, which
# may be influenced by other tests.
@pytest.mark.parametrize("val", ["1"])
def test_VLLM_DISABLE_COMPILE_CACHE(vllm_runner, monkeypatch, val):
    # Disable multiprocessing so that the counter is in the same process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", val)

    compilation_config = {
        "cudagraph_mode": CUDAGraphMode.NONE,  # speed things up a bit
    }
    with (
        compilation_counter.expect(
            num_cache_entries_updated=0, num_compiled_artifacts_saved=0
        ),
        # loading the model causes compilation (if enabled) to happen
        vllm_runner(
            "facebook/opt-125m",
            compilation_config=compilation_config,
            gpu_memory_utilization=0.4,
        ) as _,
    ):
        pass


# forked needed to workaround https://github.com/vllm-project/vllm/issues/21073
@pytest.mark.forked
@pytest.mark.parametrize(
    "cudagraph_mode,num_cudagraph_captured",
    [
        (CUDAGraphMode.NONE, 0),
        (CUDAGraphMode.FULL_DECODE_ONLY, 1),
        (CUDAGraphMode.PIECEWISE, 13),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 14),
    ],
)
def test_use_cudagraphs(
    vllm_runner, monkeypatch, cudagraph_mode, num_cudagraph_captured
):
    # Disable multiprocessing so that the counter is in the same process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    compilation_config = {
        "cudagraph_capture_sizes": [100],
        "cudagraph_mode": cudagraph_mode,
    }
    num_gpu_runner_capture_triggers = 1 if cudagraph_mode != CUDAGraphMode.NONE else 0
    with (
        compilation_counter.expect(
            num_graphs_seen=1,
            num_gpu_runner_capture_triggers=num_gpu_runner_capture_triggers,
            num_cudagraph_captured=num_cudagraph_captured,
        ),
        # loading the model causes compilation (if enabled) to happen
        vllm_runner(
            "facebook/opt-125m",
            compilation_config=compilation_config,
            gpu_memory_utilization=0.4,
        ) as _,
    ):
        pass


# forked needed to workaround https://github.com/vllm-project/vllm/issues/21073
@pytest.mark.forked
@pytest.mark.parametrize("use_v2_model_runner", [False, True])
def test_stock_torch_compile(vllm_runner, monkeypatch, use_v2_model_runner):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(use_v2_model_runner)))
    # Disable multiprocessing so that the counter is in the same process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    with (
        compilation_counter.expect(stock_torch_compile_count=1),
        # loading the model causes compilation (if enabled) to happen
        vllm_runner(
            "facebook/opt-125m",
            compilation_config={"mode": CompilationMode.STOCK_TORCH_COMPILE},
            gpu_memory_utilization=0.4,
        ) as runner,
    ):
        outputs = runner.generate_greedy(["Hello, my name is"], max_tokens=5)
        assert outputs[0][0]


# forked needed to workaround https://github.com/vllm-project/vllm/issues/21073
@pytest.mark.forked
def test_no_compilation(vllm_runner, monkeypatch):
    # Disable multiprocessing so that the counter is in the same process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with (
        compilation_counter.expect(num_graphs_seen=0, stock_torch_compile_count=0),
        # loading the model causes compilation (if enabled) to happen
        vllm_runner(
            "facebook/opt-125m",
            compilation_config={"mode": CompilationMode.NONE},
            gpu_memory_utilization=0.4,
        ) as _,
    ):
        pass


# forked needed to workaround https://github.com/vllm-project/vllm/issues/21073
@pytest.mark.forked
def test_enforce_eager(vllm_runner, monkeypatch):
    # Disable multiprocessing so that the counter is in the same process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    with (
        compilation_counter.expect(num_graphs_seen=0, stock_torch_compile_count=0),
        # loading the model causes compilation (if enabled) to happen
        vllm_runner(
            "facebook/opt-125m", enforce_eager=True, gpu_memory_utilization=0.4
        ) as _,
    ):
        pass


@pytest.mark.parametrize("enable_fault_tolerance", [False, True])
def test_enforce_eager_jit_warmup(enable_fault_tolerance):
    """Enforce-eager disables JIT warmup unless fault tolerance is on.

    FT fault detection runs against deadlines that in-inference Triton
    compilation latency spikes can blow past, so warmup stays enabled.
    """
    config = VllmConfig(
        model_config=ModelConfig(model="facebook/opt-125m", enforce_eager=True),
        parallel_config=ParallelConfig(enable_fault_tolerance=enable_fault_tolerance),
    )
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.kernel_config.enable_jit_warmup == enable_fault_tolerance


@pytest.mark.forked
def test_torch_compile_disable(vllm_runner, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")

    with (
        compilation_counter.expect(num_graphs_seen=0, stock_torch_compile_count=0),
        vllm_runner(
            "facebook/opt-125m",
            gpu_memory_utilization=0.4,
        ) as _,
    ):
        pass


def test_splitting_ops_dynamic():
    # Default config
    config = VllmConfig()
    # Default V1 config leaves cudagraph mode unset; splitting ops are only
    # populated when the engine decides to use piecewise compilation.
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.compilation_config.splitting_ops_contain_attention()
    splitting_ops = config.compilation_config.splitting_ops
    assert splitting_ops is not None
    assert {
        "vllm::qwen_gdn_attention_core_fused_norm_packed",
    } <= set(splitting_ops)

    # When use_inductor_graph_partition=True
    config = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            use_inductor_graph_partition=True,
            splitting_ops=["vllm::unified_attention_with_output"],
        )
    )
    # with inductor partition we use splitting_ops directly for
    # partition rules
    assert config.compilation_config.splitting_ops == [
        "vllm::unified_attention_with_output"
    ]

    # When attn_fusion pass enabled.
    config = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            pass_config=PassConfig(fuse_attn_quant=True, eliminate_noops=True),
            custom_ops=["+quant_fp8"],
            cudagraph_mode=CUDAGraphMode.PIECEWISE,
        )
    )
    assert config.compilation_config.splitting_ops == []
    # cudagraph mode also fall back to FULL
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL

    # splitting_ops can not contain attention ops when attn_fusion
    # pass enabled.
    with pytest.raises(ValidationError):
        config = VllmConfig(
            compilation_config=CompilationConfig(
                mode=CompilationMode.VLLM_COMPILE,
                pass_config=PassConfig(fuse_attn_quant=True, eliminate_noops=True),
                custom_ops=["+quant_fp8"],
                cudagraph_mode=CUDAGraphMode.PIECEWISE,
                # work around for accessing all attntion ops
                splitting_ops=CompilationConfig()._attention_ops,
            )
        )

    # When both use_inductor_graph_partition and attn_fusion pass enabled.
    config = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            use_inductor_graph_partition=True,
            pass_config=PassConfig(fuse_attn_quant=True, eliminate_noops=True),
            custom_ops=["+quant_fp8"],
            cudagraph_mode=CUDAGraphMode.PIECEWISE,
        )
    )
    # With inductor graph partition, attn_fusion and splitting_ops
    # work together. Default splitting_ops include attention ops.
    assert config.compilation_config.splitting_ops_contain_attention()
    # fuse_attn_quant is directly supported under
    # use_inductor_graph_partition=True, and cudagraph_mode
    # is unchanged.
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE


def test_moe_splitting_ops_deepep_ht_inductor_partition():
    # Inductor partition case: user-provided splitting_ops should be
    # preserved and MoE ops should be appended for DeepEP HT with dp>1.
    config = VllmConfig(
        parallel_config=ParallelConfig(
            all2all_backend="deepep_high_throughput",
            data_parallel_size=8,
        ),
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            use_inductor_graph_partition=True,
            splitting_ops=[
                "vllm::unified_attention_with_output",
                "vllm::moe_forward",
                "vllm::moe_forward_shared",
            ],
        ),
    )
    splitting_ops = config.compilation_config.splitting_ops
    assert splitting_ops == [
        "vllm::unified_attention_with_output",
        "vllm::moe_forward",
        "vllm::moe_forward_shared",
    ]


def test_should_split():
    import torch

    from vllm.compilation.partition_rules import should_split

    graph = torch.fx.Graph()
    node = torch.fx.Node(
        graph=graph,
        name="dummy_node",
        op="call_function",
        target=torch.ops.aten.add.default,
        args=(),
        kwargs={},
    )

    # supports OpOverloadPacket
    splitting_ops = ["aten::add"]
    assert should_split(node, splitting_ops)

    # supports OpOverload
    splitting_ops = ["aten::add.default"]
    assert should_split(node, splitting_ops)

    # supports OpOverload
    splitting_ops = ["aten::add.Tensor"]
    assert not should_split(node, splitting_ops)

    q, k, v, out = [torch.randn(1)] * 4

    # supports custom ops as OpOverloadPacket
    node = torch.fx.Node(
        graph=graph,
        name="dummy_node",
        op="call_function",
        target=torch.ops.silly.attention,
        args=(q, k, v, out),
        kwargs={},
    )

    splitting_ops = ["silly::attention"]
    assert should_split(node, splitting_ops)

    # supports custom ops as OpOverload
    node = torch.fx.Node(
        graph=graph,
        name="dummy_node",
        op="call_function",
        target=torch.ops.silly.attention.default,
        args=(q, k, v, out),
        kwargs={},
    )

    splitting_ops = ["silly::attention"]
    assert should_split(node, splitting_ops)

    splitting_ops = ["silly::attention.default"]
    assert should_split(node, splitting_ops)


@pytest.mark.skipif(
    not current_platform.support_static_graph_mode(),
    reason="Skip if not cudagraph mode supported",
)
@pytest.mark.parametrize(
    (
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "max_num_batched_tokens",
        "cudagraph_mode",
        "expected_max_size",
    ),
    [
        (None, None, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, 256),
        ([1, 2, 4], 4, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, 4),
        (
            [1, 2, 4],
            8,
            2048,
            CUDAGraphMode.FULL_AND_PIECEWISE,
            ValidationError,
        ),
        ([1, 256], None, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, 256),
        ([], None, 2048, CUDAGraphMode.NONE, 0),
        (None, 0, 2048, CUDAGraphMode.NONE, 0),
        # truncated to nearest multiple of 8 or 16
        (None, 257, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, 256),
        # max_num_batched_tokens <= max_cudagraph_capture_size should always be
        # captured even if not landing on a 16-stride step
        (None, 2048, 257, CUDAGraphMode.FULL_AND_PIECEWISE, 257),
        # max from list
        ([1, 2, 4, 15], None, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, 15),
        # limited by the max_tokens
        ([1, 2, 4, 15], None, 8, CUDAGraphMode.FULL_AND_PIECEWISE, 4),
        # the list should contain at least 1 element when use cudagraph
        ([], None, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, ValidationError),
        # the max capturing size should be >= 1 when use cudagraph
        (None, 0, 2048, CUDAGraphMode.FULL_AND_PIECEWISE, ValidationError),
    ],
)
def test_cudagraph_sizes_post_init(
    cudagraph_capture_sizes,
    max_cudagraph_capture_size,
    max_num_batched_tokens,
    cudagraph_mode,
    expected_max_size,
):
    ctx = nullcontext()
    if expected_max_size == ValidationError:
        ctx = pytest.raises(expected_max_size)

    with ctx:
        kwargs = {}
        if cudagraph_capture_sizes is not None:
            kwargs["cudagraph_capture_sizes"] = cudagraph_capture_sizes
        if max_cudagraph_capture_size is not None:
            kwargs["max_cudagraph_capture_size"] = max_cudagraph_capture_size
        compilation_config = CompilationConfig(
            pass_config=PassConfig(
                fuse_norm_quant=True,
                fuse_act_quant=True,
                eliminate_noops=True,
            ),
            cudagraph_mode=cudagraph_mode,
            **kwargs,
        )
        engine_args = EngineArgs(
            model="facebook/opt-125m",
            max_num_seqs=min(max_num_batched_tokens, 128),
            max_num_batched_tokens=max_num_batched_tokens,
            compilation_config=compilation_config,
        )
        vllm_config = engine_args.create_engine_config()

        assert (
            vllm_config.compilation_config.max_cudagraph_capture_size
            == expected_max_size
        )


def _mock_config_for_cudagraph_sizes(
    max_num_seqs: int,
    num_speculative_tokens: int,
    max_num_batched_tokens: int,
    compilation_config: CompilationConfig,
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None,
) -> MagicMock:
    """Mock VllmConfig wired up enough to run `_set_cudagraph_sizes`.

    `num_speculative_tokens` and `uniform_decode_query_len` are filled in by
    calling the real property functions, so the tests below cover the
    derivation from `speculative_config` and not just the arithmetic
    downstream of it.
    """
    config = MagicMock(spec=VllmConfig)
    config.compilation_config = compilation_config
    config.scheduler_config = SchedulerConfig.default_factory(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    config.parallel_config = ParallelConfig()
    config.model_config = MagicMock()
    config.model_config.enforce_eager = False
    config.performance_mode = None
    config.diffusion_config = None
    schedule = num_speculative_tokens_per_batch_size
    config.speculative_config = (
        SimpleNamespace(
            num_speculative_tokens=num_speculative_tokens,
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        )
        if num_speculative_tokens
        else None
    )
    config.num_speculative_tokens = VllmConfig.num_speculative_tokens.fget(config)
    config.uniform_decode_query_len = VllmConfig.uniform_decode_query_len.fget(config)
    return config


@pytest.mark.parametrize("max_num_seqs", [100, 101])
def test_default_cudagraph_capture_sizes_cover_off_stride_max_num_seqs(
    max_num_seqs: int,
) -> None:
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=0,
        max_num_batched_tokens=32768,
        compilation_config=compilation_config,
    )

    VllmConfig._set_cudagraph_sizes(config)

    assert max_num_seqs in compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "num_speculative_tokens", "widest_is_captured"),
    [
        # No speculation: the 2x headroom under the platform ceiling, unchanged.
        (8, 0, True),
        (32, 0, True),
        # Speculating, but the widest decode batch still fits under the ceiling.
        (64, 7, True),
        (256, 1, True),
        # Wider decode batches must not raise the memory-safety ceiling.
        (32, 16, False),
        (64, 16, False),
        # Exact H200 regressions: DFlash (2176) and suffix decoding (6400).
        (128, 16, False),
        (256, 24, False),
        # Widest decode batch off the capture stride, above the ceiling.
        (33, 16, False),
        # ... and off the stride while below it, where the ceiling stands but
        # the generated sizes would otherwise stop at 400.
        (24, 16, True),
    ],
)
def test_default_cudagraph_capture_size_respects_platform_ceiling(
    max_num_seqs, num_speculative_tokens, widest_is_captured
):
    """Uniform decode coverage must not raise the platform default ceiling.

    A decode step presents up to `max_num_seqs * (1 + num_speculative_tokens)`
    tokens. Off-stride sizes within the platform ceiling are captured exactly.
    Larger batches fall back to eager execution instead of expanding the
    default capture range and risking OOM during engine initialization.
    """
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=num_speculative_tokens,
        max_num_batched_tokens=32768,
        compilation_config=compilation_config,
    )

    VllmConfig._set_cudagraph_sizes(config)

    decode_query_len = 1 + num_speculative_tokens
    default_max_graph_size = (
        1024 if current_platform.is_device_capability_family(100) else 512
    )
    token_grid_max = min(
        max_num_seqs * decode_query_len * 2,
        default_max_graph_size,
    )
    widest_uniform_decode = max_num_seqs * decode_query_len
    assert compilation_config.max_cudagraph_capture_size == token_grid_max
    assert (
        compilation_config.max_cudagraph_capture_size
        == compilation_config.cudagraph_capture_sizes[-1]
    )
    assert (
        widest_uniform_decode in compilation_config.cudagraph_capture_sizes
    ) is widest_is_captured


def test_default_cudagraph_capture_sizes_keep_all_sizes_bounded():
    """Keep both token and uniform-decode grids under the platform default.

    This guards both the measured 581 versus 100 capture-count regression and
    the graph-memory regression from capturing shapes up to 8704 tokens.
    """
    max_num_seqs = 512
    decode_query_len = 17
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=16,
        max_num_batched_tokens=32768,
        compilation_config=compilation_config,
    )

    with patch.object(
        current_platform,
        "is_device_capability_family",
        return_value=False,
    ):
        default_max_graph_size = (
            1024 if current_platform.is_device_capability_family(100) else 512
        )
        VllmConfig._set_cudagraph_sizes(config)

    token_grid_max = min(max_num_seqs * decode_query_len * 2, default_max_graph_size)
    token_grid = [size for size in [1, 2, 4] if size <= token_grid_max]
    token_grid += list(range(8, min(token_grid_max + 1, 256), 8))
    token_grid += list(range(256, token_grid_max + 1, 16))

    max_request_count = min(max_num_seqs, default_max_graph_size)
    request_counts = [count for count in [1, 2, 4] if count <= max_request_count]
    request_counts += list(range(8, min(max_request_count + 1, 256), 8))
    request_counts += list(range(256, max_request_count + 1, 16))
    request_counts.append(max_request_count)
    expected_sizes = sorted(
        set(
            token_grid
            + [
                count * decode_query_len
                for count in request_counts
                if count * decode_query_len <= default_max_graph_size
            ]
        )
    )

    assert compilation_config.cudagraph_capture_sizes == expected_sizes
    assert all(
        size <= default_max_graph_size
        for size in compilation_config.cudagraph_capture_sizes
    )


@pytest.mark.skipif(not current_platform.is_cuda(), reason="Only test CUDA")
def test_real_vllm_config_caps_widest_ngram_decode_batch():
    """Real config post-init preserves the default capture ceiling."""
    model_config = ModelConfig(model="facebook/opt-125m")
    speculative_config = SpeculativeConfig(
        prompt_lookup_min=1,
        prompt_lookup_max=1,
        num_speculative_tokens=16,
        method="ngram",
    )
    scheduler_config = SchedulerConfig.default_factory(
        max_num_seqs=32,
        max_num_batched_tokens=32768,
    )
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )

    with patch.object(
        current_platform,
        "is_device_capability_family",
        return_value=False,
    ):
        config = VllmConfig(
            model_config=model_config,
            speculative_config=speculative_config,
            scheduler_config=scheduler_config,
            compilation_config=compilation_config,
        )

    assert 544 not in config.compilation_config.cudagraph_capture_sizes
    assert (
        config.compilation_config.max_cudagraph_capture_size
        == config.compilation_config.cudagraph_capture_sizes[-1]
        == 512
    )


@pytest.mark.parametrize("max_num_seqs", [8, 32, 256, 300, 512, 600, 1024, 2048])
def test_default_cudagraph_capture_size_unchanged_without_speculation(max_num_seqs):
    """Without speculation the default must reproduce the historical formula.

    The platform ceiling bounds a request count, and without speculation a
    request is one token, so `min(max_num_seqs, ceiling) * 1` can never lift it.
    The result must match `min(max_num_seqs * 2, ceiling)` bit for bit.
    """
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=0,
        max_num_batched_tokens=1_000_000,
        compilation_config=compilation_config,
    )

    with patch.object(
        current_platform,
        "is_device_capability_family",
        return_value=False,
    ):
        VllmConfig._set_cudagraph_sizes(config)

    default_max_graph_size = (
        1024 if current_platform.is_device_capability_family(100) else 512
    )
    assert compilation_config.max_cudagraph_capture_size == min(
        max_num_seqs * 2,
        default_max_graph_size,
    )


def test_single_speculative_token_does_not_raise_default_capture_size():
    """One speculative token must not raise the default capture ceiling.

    MTP at depth 1 gives a query length of 2, so 300 requests is a 600-token
    decode batch against the platform's token ceiling. The widest batch falls
    back to eager execution rather than expanding the capture range.
    """
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=300,
        num_speculative_tokens=1,
        max_num_batched_tokens=1_000_000,
        compilation_config=compilation_config,
    )

    VllmConfig._set_cudagraph_sizes(config)

    default_max_graph_size = (
        1024 if current_platform.is_device_capability_family(100) else 512
    )
    token_grid_max = min(300 * 2 * 2, default_max_graph_size)
    assert compilation_config.max_cudagraph_capture_size == token_grid_max
    assert (
        compilation_config.max_cudagraph_capture_size
        == compilation_config.cudagraph_capture_sizes[-1]
    )
    assert 600 not in compilation_config.cudagraph_capture_sizes


def test_default_cudagraph_capture_size_caps_tokens():
    """The ceiling remains a platform-bounded token count.

    `max_num_seqs` and speculative width must not push the default capture range
    above the platform's memory-safety guard.
    """
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=1024,
        num_speculative_tokens=16,
        max_num_batched_tokens=1_000_000,
        compilation_config=compilation_config,
    )

    VllmConfig._set_cudagraph_sizes(config)

    default_max_graph_size = (
        1024 if current_platform.is_device_capability_family(100) else 512
    )
    assert compilation_config.max_cudagraph_capture_size == default_max_graph_size
    assert (
        compilation_config.max_cudagraph_capture_size
        == compilation_config.cudagraph_capture_sizes[-1]
    )
    assert all(
        size <= default_max_graph_size
        for size in compilation_config.cudagraph_capture_sizes
    )


def _widest_covered_request_count(capture_sizes, query_len, max_num_seqs):
    """Widest request count `CudaGraphManager` can build a decode graph for.

    Mirrors `_init_candidates`: a capture size is rounded up to a multiple of
    the tier's query length, then dropped once the implied request count runs
    past `max_num_seqs`.
    """
    reachable = [
        cdiv(size, query_len)
        for size in capture_sizes
        if cdiv(size, query_len) <= max_num_seqs
    ]
    return max(reachable, default=0)


def test_default_cudagraph_capture_sizes_cover_every_dynamic_decode_width():
    """Each scheduled draft width needs sizes over the range it applies to.

    Dynamic speculative decoding picks the width from the batch size, so
    scaling by the widest one alone leaves the narrower tiers short: sizes
    built from query length 17 round up to multiples of 3 that imply more
    requests than the scheduler can run, and coverage stops at 227 of 256.
    """
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=128,
        num_speculative_tokens=16,
        max_num_batched_tokens=32768,
        compilation_config=compilation_config,
        # 16 draft tokens up to a batch of 16, then 2 out to 128. Both
        # tier maxima fit under the 512-token default capture ceiling.
        num_speculative_tokens_per_batch_size=[(1, 16, 16), (17, 128, 2)],
    )

    VllmConfig._set_cudagraph_sizes(config)

    sizes = compilation_config.cudagraph_capture_sizes
    # The wide tier only ever runs to a batch of 16, the narrow one to 128.
    assert _widest_covered_request_count(sizes, 17, 128) >= 16
    assert _widest_covered_request_count(sizes, 3, 128) == 128


def test_dynamic_decode_capture_clamps_configured_width():
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=16,
        num_speculative_tokens=3,
        max_num_batched_tokens=32768,
        compilation_config=compilation_config,
        num_speculative_tokens_per_batch_size=[(1, 16, 5)],
    )

    VllmConfig._set_cudagraph_sizes(config)

    sizes = compilation_config.cudagraph_capture_sizes
    assert _widest_covered_request_count(sizes, 4, 16) == 16
    assert 6 not in sizes


def test_dynamic_decode_capture_covers_schedule_gap_and_tail():
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=17,
        num_speculative_tokens=4,
        max_num_batched_tokens=32768,
        compilation_config=compilation_config,
        num_speculative_tokens_per_batch_size=[(1, 2, 4), (5, 5, 1)],
    )

    VllmConfig._set_cudagraph_sizes(config)

    sizes = compilation_config.cudagraph_capture_sizes
    assert 20 in sizes
    assert 34 in sizes


def test_default_cudagraph_capture_size_still_clamped_by_token_budget():
    """Decode coverage does not override the `max_num_batched_tokens` clamp.

    A batch wider than the token budget cannot be scheduled in the first place,
    so there is no decode step of that size to capture a graph for.
    """
    compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = _mock_config_for_cudagraph_sizes(
        max_num_seqs=32,
        num_speculative_tokens=16,
        max_num_batched_tokens=512,
        compilation_config=compilation_config,
    )

    VllmConfig._set_cudagraph_sizes(config)

    # The token budget still clamps the final capture size.
    default_max_graph_size = (
        1024 if current_platform.is_device_capability_family(100) else 512
    )
    decode_query_len = 17
    token_grid_max = min(
        32 * decode_query_len * 2,
        default_max_graph_size,
    )
    widest_capturable_decode = min(
        32 * decode_query_len,
        512,
    )
    expected_max_size = max(token_grid_max, widest_capturable_decode)
    assert compilation_config.max_cudagraph_capture_size == expected_max_size
    assert (
        compilation_config.max_cudagraph_capture_size
        == compilation_config.cudagraph_capture_sizes[-1]
    )
    assert 544 not in compilation_config.cudagraph_capture_sizes


@pytest.mark.skipif(
    not current_platform.support_static_graph_mode(),
    reason="Skip if static graph mode is not supported",
)
@pytest.mark.parametrize(
    ("is_blackwell", "expected_max_size"), [(False, 512), (True, 1024)]
)
def test_blackwell_cudagraph_default(is_blackwell, expected_max_size):
    vllm_config = VllmConfig()
    vllm_config.model_config = MagicMock(enforce_eager=False)
    vllm_config.scheduler_config = SchedulerConfig(
        max_num_seqs=512,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        is_encoder_decoder=False,
    )
    vllm_config.compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    )

    with patch.object(
        current_platform,
        "is_device_capability_family",
        return_value=is_blackwell,
    ):
        vllm_config._set_cudagraph_sizes()

    assert (
        vllm_config.compilation_config.max_cudagraph_capture_size == expected_max_size
    )


def test_cached_compilation_config(default_vllm_config):
    import torch
    from torch._inductor.utils import run_and_get_code

    from vllm.config import get_cached_compilation_config, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    dtype = torch.bfloat16
    device = torch.device(f"{DEVICE_TYPE}:0")
    batch_size, num_qo_heads, head_size = 8, 16, 128

    # access and cache default compilation config
    # default compilation config does not contain +quant_fp8 custom op. If this is
    # used, the generated code would use inductor-generated triton kernel instead
    # of the custom op `torch.ops._C.static_scaled_fp8_quant`.
    get_cached_compilation_config()

    vllm_config = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            custom_ops=["+quant_fp8"],
        )
    )

    # set_current_vllm_config should clear cached compilation config and
    # use the new compilation_config in vllm_config
    with set_current_vllm_config(vllm_config):
        query_quant = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
        query_quant = torch.compile(query_quant)

        _q_scale = torch.tensor(1.0, dtype=torch.float32, device=DEVICE_TYPE)
        query = torch.randn(
            batch_size, num_qo_heads * head_size, dtype=dtype, device=device
        )

        _, code = run_and_get_code(query_quant, query, _q_scale)

    code = " ".join(code)
    assert "torch.ops._C.static_scaled_fp8_quant.default(" in code


def _create_vllm_config_for_validation(
    compilation_config: CompilationConfig,
) -> MagicMock:
    """Helper to create a mock VllmConfig for padding validation testing."""
    mock_config = MagicMock(spec=VllmConfig)
    mock_config.compilation_config = compilation_config
    mock_config.scheduler_config = SchedulerConfig.default_factory(max_num_seqs=8)
    mock_config.parallel_config = ParallelConfig()
    mock_config.speculative_config = None
    mock_config.lora_config = None
    return mock_config


def test_compile_sizes_padding_validation():
    """Test that compile_sizes with values that would be padded raises an error."""
    # cudagraph_capture_sizes=[1, 2, 4, 8] means:
    # - size 1 -> padded to 1
    # - size 2 -> padded to 2
    # - size 3 -> padded to 4
    # - size 4 -> padded to 4
    # - size 5 -> padded to 8
    # etc.
    # So compile_sizes=[3] should fail because 3 would be padded to 4

    with pytest.raises(ValueError, match="would be padded to"):
        config = CompilationConfig(
            cudagraph_capture_sizes=[1, 2, 4, 8],
            max_cudagraph_capture_size=8,
            compile_sizes=[3],
            cudagraph_mode=CUDAGraphMode.FULL,
        )
        config.post_init_cudagraph_sizes()
        dispatcher = CudagraphDispatcher(_create_vllm_config_for_validation(config))
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL)

    with pytest.raises(ValueError, match="would be padded to"):
        config = CompilationConfig(
            cudagraph_capture_sizes=[1, 2, 4, 8],
            max_cudagraph_capture_size=8,
            compile_sizes=[5],
            cudagraph_mode=CUDAGraphMode.FULL,
        )
        config.post_init_cudagraph_sizes()
        dispatcher = CudagraphDispatcher(_create_vllm_config_for_validation(config))
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL)

    config = CompilationConfig(
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        compile_sizes=[1, 2, 4, 8],
        cudagraph_mode=CUDAGraphMode.FULL,
    )
    config.post_init_cudagraph_sizes()
    assert sorted(config.compile_sizes) == [1, 2, 4, 8]
    dispatcher = CudagraphDispatcher(_create_vllm_config_for_validation(config))
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL)  # Should not raise

    config = CompilationConfig(
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        compile_sizes=["cudagraph_capture_sizes"],
        cudagraph_mode=CUDAGraphMode.FULL,
    )
    config.post_init_cudagraph_sizes()
    assert sorted(config.compile_sizes) == [1, 2, 4, 8]

    # When cudagraphs are disabled (max_cudagraph_capture_size=0),
    # padding validation should be skipped
    config = CompilationConfig(
        cudagraph_capture_sizes=[],
        max_cudagraph_capture_size=0,
        compile_sizes=[3, 5, 7],  # would be invalid with cudagraphs
    )
    config.post_init_cudagraph_sizes()
    assert sorted(config.compile_sizes) == [3, 5, 7]

    # When cudagraph_mode is NONE but capture_sizes is non-empty,
    # padding validation should still be skipped
    config = CompilationConfig(
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        cudagraph_mode=CUDAGraphMode.NONE,
        compile_sizes=[3, 5, 7],  # would be invalid if cudagraphs were enabled
    )
    config.post_init_cudagraph_sizes()
    assert sorted(config.compile_sizes) == [3, 5, 7]
    dispatcher = CudagraphDispatcher(_create_vllm_config_for_validation(config))
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)  # Should not raise


def test_inductor_asserts_default_disabled(monkeypatch):
    """Test that inductor runtime asserts are disabled by default
    (INFO logging level) on torch < 2.12."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")

    import importlib

    import vllm.envs

    importlib.reload(vllm.envs)

    config = CompilationConfig()
    if not _is_torch_equal_or_newer(torch.__version__, "2.12.0.dev"):
        assert config.inductor_compile_config.get("size_asserts") is False
        assert config.inductor_compile_config.get("alignment_asserts") is False
        assert config.inductor_compile_config.get("scalar_asserts") is False


def test_inductor_asserts_enabled_in_debug(monkeypatch):
    """Test that VLLM_LOGGING_LEVEL=DEBUG enables inductor runtime asserts
    on torch < 2.12."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")

    import importlib

    import vllm.envs

    importlib.reload(vllm.envs)

    config = CompilationConfig()
    if not _is_torch_equal_or_newer(torch.__version__, "2.12.0.dev"):
        assert config.inductor_compile_config.get("size_asserts") is True
        assert config.inductor_compile_config.get("alignment_asserts") is True
        assert config.inductor_compile_config.get("scalar_asserts") is True


def test_get_inductor_factors_includes_configs():
    """Changing inductor or functorch config must change the cache key factors."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    from vllm.compilation.compiler_interface import get_inductor_factors

    baseline = get_inductor_factors()

    with inductor_config.patch("max_autotune", not inductor_config.max_autotune):
        patched = get_inductor_factors()
    assert baseline != patched, "inductor config change was not reflected"

    with functorch_config.patch("donated_buffer", not functorch_config.donated_buffer):
        patched = get_inductor_factors()
    assert baseline != patched, "functorch config change was not reflected"


def test_inductor_asserts_user_override(monkeypatch):
    """Test that explicit inductor_compile_config overrides the
    debug-logging default."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")

    import importlib

    import vllm.envs

    importlib.reload(vllm.envs)

    config = CompilationConfig(
        inductor_compile_config={"size_asserts": True},
    )
    assert config.inductor_compile_config.get("size_asserts") is True
    if not _is_torch_equal_or_newer(torch.__version__, "2.12.0.dev"):
        assert config.inductor_compile_config.get("alignment_asserts") is False


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("override", [None, False, True])
def test_combo_kernel_benchmarking_respects_deterministic(deterministic, override):
    from torch._inductor import config as inductor_config

    overrides = {} if override is None else {"deterministic": override}
    with (
        inductor_config.patch(deterministic=deterministic),
        patch("vllm.config.compilation.current_platform.is_cpu", return_value=False),
    ):
        config = CompilationConfig(inductor_compile_config=overrides)

    assert config.inductor_compile_config["combo_kernels"] is True
    effective_deterministic = deterministic if override is None else override
    assert config.inductor_compile_config["benchmark_combo_kernel"] is (
        not effective_deterministic
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {"combo_kernels": False},
        {"combo_kernels": True},
        {"benchmark_combo_kernel": False},
        {"benchmark_combo_kernel": True},
    ],
)
def test_combo_kernel_explicit_settings_preserved(deterministic, overrides):
    from torch._inductor import config as inductor_config

    with (
        inductor_config.patch(deterministic=deterministic),
        patch("vllm.config.compilation.current_platform.is_cpu", return_value=False),
    ):
        config = CompilationConfig(inductor_compile_config=overrides.copy())

    for key in ("combo_kernels", "benchmark_combo_kernel"):
        assert config.inductor_compile_config.get(key) == overrides.get(key)


@pytest.mark.parametrize("is_cpu,torch_version", [(True, "2.13.0"), (False, "2.8.0")])
def test_combo_kernel_defaults_require_supported_platform_and_torch(
    is_cpu, torch_version
):
    with (
        patch("vllm.config.compilation.current_platform.is_cpu", return_value=is_cpu),
        patch("torch.__version__", torch_version),
    ):
        config = CompilationConfig()

    assert "combo_kernels" not in config.inductor_compile_config
    assert "benchmark_combo_kernel" not in config.inductor_compile_config


def test_combo_kernel_defaults_without_inductor_deterministic_setting():
    with (
        patch("torch._inductor.config", SimpleNamespace()),
        patch("vllm.config.compilation.current_platform.is_cpu", return_value=False),
    ):
        config = CompilationConfig()

    assert config.inductor_compile_config["combo_kernels"] is True
    assert config.inductor_compile_config["benchmark_combo_kernel"] is True
