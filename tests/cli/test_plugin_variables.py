"""Every variable of vLLM's Gaudi plug-in works, is neutral with one line, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.core import envs
from trencadis.core.errors import StartupError
from trencadis.server import __main__ as module
from trencadis.server.cli import main
from trencadis.server.config.flag_table_and_lookup import get_flag_variables

pytestmark = pytest.mark.part("gaudi")

ROOT = Path(__file__).resolve().parents[2]

NAMES = """
VLLM_SKIP_WARMUP VLLM_GRAPH_RESERVED_MEM VLLM_GRAPH_PROMPT_RATIO VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO
VLLM_GRAPH_PROMPT_STRATEGY VLLM_GRAPH_DECODE_STRATEGY VLLM_FULL_WARMUP VLLM_ENABLE_BUCKETING VLLM_PT_PROFILE
VLLM_PROFILE_PROMPT VLLM_PROFILE_DECODE VLLM_PROFILE_STEPS PT_HPU_LAZY_MODE VLLM_REGIONAL_COMPILATION
VLLM_T_COMPILE_REGIONAL_COMPILATION VLLM_T_COMPILE_FULLGRAPH VLLM_T_COMPILE_DYNAMIC_SHAPES
VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY VLLM_EXPONENTIAL_BUCKETING VLLM_BUCKETING_STRATEGY VLLM_BUCKETING_FROM_FILE
VLLM_PROMPT_BS_BUCKET_MIN VLLM_PROMPT_SEQ_BUCKET_STEP VLLM_PROMPT_QUERY_BUCKET_MAX VLLM_PROMPT_CTX_BUCKET_MAX
VLLM_DECODE_BS_BUCKET_MIN VLLM_DECODE_BLOCK_BUCKET_MAX VLLM_DECODE_BLOCK_BUCKET_PAD_MAX
VLLM_PROMPT_QUERY_BUCKET_PAD_PERCENT VLLM_MULTIMODAL_BUCKETS VLLM_MULTIMODAL_RESOLUTIONS VLLM_MERGED_PREFILL
VLLM_FP32_SOFTMAX VLLM_FP32_SOFTMAX_VISION VLLM_PROMPT_USE_FUSEDSDPA VLLM_PROMPT_USE_FLEX_ATTENTION
VLLM_PROMPT_ATTN_IMPL VLLM_CONTIGUOUS_PA VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT VLLM_FUSED_BLOCK_SOFTMAX
VLLM_SOFTMAX_CONST_NORM VLLM_SOFTMAX_CONST_NORM_VALUE VLLM_FUSEDSDPA_SLIDE_THLD VLLM_FUSEDSDPA_SLIDE_RIGHT
VLLM_HPU_FSDPA_SLICE_ENABLED VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE
VLLM_HPU_FSDPA_SLICE_WITH_GRAPH_BREAKS VLLM_ALIBI_USE_FLOAT32_BIASES VLLM_COS_SIN_RECOMPUTE
VLLM_HANDLE_TOPK_DUPLICATES VLLM_DELAYED_SAMPLING VLLM_HPU_FORCE_MARK_STEP VLLM_CONFIG_HIDDEN_LAYERS
VLLM_HPU_LOG_STEP_GRAPH_COMPILATION VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL VLLM_HPU_LOG_STEP_CPU_FALLBACKS
VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL VLLM_PROFILER_ENABLED VLLM_DEBUG VLLM_DEFRAG VLLM_DEFRAG_THRESHOLD
VLLM_DEFRAG_WITH_GRAPHS VLLM_GC_THR_GEN0 VLLM_GC_THR_GEN1 VLLM_GC_THR_GEN2 VLLM_GC_THR_MULTIPLIER VLLM_USE_FAKE_HPU
PT_HPU_ENABLE_LAZY_COLLECTIVES FUSER_ENABLE_MULTI_THREADED_INVOCATIONS PT_HPUGRAPH_DISABLE_TENSOR_CACHE
PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE PT_HPU_RECIPE_CACHE_CONFIG HABANA_VISIBLE_MODULES VLLM_WORKER_MULTIPROC_METHOD
VLLM_HW VLLM_BUILD VLLM_ENGINE_VERSION VLLM_BRIDGE_MODE VLLM_MODEL_TYPE VLLM_PREFIX_CACHING QUANT_CONFIG
VLLM_DISABLE_MARK_SCALES_AS_CONST VLLM_HPU_CONVERT_TO_FP8UZ VLLM_HPU_FORCE_CHANNEL_FP8 VLLM_SCALE_ADJUSTMENT
VLLM_FLATTEN_INPUT VLLM_MOE_CHUNK VLLM_MOE_TOKEN_BOUNDARY VLLM_ROW_PARALLEL_CHUNKS VLLM_ROW_PARALLEL_CHUNK_THRESHOLD
VLLM_DYNAMIC_KV_QUANT VLLM_COMPACT_GDN VLLM_USE_HYBRID_CACHE VLLM_USE_NAIVE_MAMBA_CACHE_SHARING VLLM_MAMBA_USE_PYTORCH
VLLM_WEIGHT_LOAD_FORCE_SYNC VLLM_HPU_HETERO_KV_LAYOUT VLLM_HPU_MULTI_MODEL_CONFIG VLLM_HPU_NIXL_JOINT_KV
VLLM_HPU_NIXL_STAGING_SLOTS VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DEVELOPER_MODE VLLM_ENABLE_EXPERIMENTAL_FLAGS
"""
KNOWN = NAMES.split()
"""What the plug-in's documents and sources name."""


def test_every_known_variable_has_one_row() -> None:
    assert len(envs.BY_NAME) == len(envs.TABLE), "the second row of a name would hide the first"
    assert [name for name in KNOWN if name not in envs.BY_NAME and name not in get_flag_variables()] == []


@pytest.mark.parametrize("name", [e.name for e in envs.TABLE if e.effect == envs.REFUSED])
def test_what_is_refused_says_why_and_the_opposite_passes(name: str) -> None:
    env = envs.BY_NAME[name]
    asks = {"true": "yes", "false": "off", envs.ALWAYS: "x"}[env.refuses]
    with pytest.raises(StartupError, match="is refused") as raised:
        list(envs.review({name: asks}))
    assert env.meaning in str(raised.value) and "\n" not in str(raised.value)
    other = {"true": "0", "false": "1", envs.ALWAYS: ""}[env.refuses]
    assert list(envs.review({name: other})) == []


def test_what_is_neutral_says_so_in_one_line() -> None:
    names = [e.name for e in envs.TABLE if e.plugin and e.effect == envs.IGNORED]
    lines = list(envs.review(dict.fromkeys(names, "1")))
    assert len(names) > 40 and len(lines) == len(names) and all("has no effect" in line for line in lines)


def test_the_page_has_them_in_one_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("### Of Gaudi's plug-ins")[2]
    for env in envs.TABLE:
        assert (f"| `{env.name}` |" in table) is env.plugin, env.name
    assert table.count("| works") > 8 and table.count("| neutral |") > 40 and table.count("| refused (") > 12


def test_the_module_takes_the_commands_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m trencadis.server`` answers ``python -m vllm.entrypoints.openai.api_server``: it is ``serve``."""
    taken: list[list[str]] = []
    monkeypatch.setattr(main, "_serve", lambda words: taken.append(list(words)) or 0)
    flags = "--model x --device hpu --max-num-seqs 128 --block-size 128 --dtype bfloat16 --gpu-memory-util 0.9"
    line = flags.split()
    assert main.serve_main(line) == 0
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["server", *line])
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, "server", "exec"), {"__name__": "__main__"})
    assert ended.value.code == 0 and taken == [line, line]
