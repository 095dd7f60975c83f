"""The VLLM_* bucket variables and the generators behind them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traffic.launch_lines import plan_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core import envs
from trencadis.core.buckets import Stage
from trencadis.core.device_shape_policy import Density
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_options import AxisSpan, BucketOptions, exp, lin, pad, read_bucket_options, sizes
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits

LIMITS = ShapeLimits(64, 8192, 4096, 128, 12544)


@given(st.sampled_from(["exp", "lin", "pad"]), st.integers(1, 300), st.integers(1, 300), st.integers(0, 9000),
       st.integers(0, 900), st.integers(0, 50))  # fmt: skip
def test_ranges_ascend_from_their_minimum_to_their_maximum(
    strategy: str, minimum: int, step: int, more: int, pad_max: int, percent: int
) -> None:
    found = sizes(strategy, AxisSpan(minimum, step, minimum + more, (Density(512, 3),), pad_max, percent))
    assert list(found) == sorted(set(found)) and found[-1] == minimum + more and found[0] >= minimum


def test_exponential_octaves() -> None:
    assert exp(AxisSpan(1, 1, 128)) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert exp(AxisSpan(64, 64, 1000, (Density(512, 4),))) == (64, 128, 192, 256, 320, 384, 448, 512, 1000)
    assert exp(AxisSpan(5, 1, 5)) == (5,)


def test_linear_ramps_up_to_its_step() -> None:
    assert lin(AxisSpan(1, 32, 100)) == (1, 2, 4, 8, 16, 32, 64, 96, 100)
    assert lin(AxisSpan(3, 32, 70)) == (3, 6, 12, 24, 32, 64, 70)
    assert lin(AxisSpan(128, 128, 3000))[-2:] == (2944, 3000)


def test_padding_limits() -> None:
    assert pad(AxisSpan(128, 128, 2048, pad_max=512)) == (128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
    assert pad(AxisSpan(1, 1, 20, pad_percent=0)) == tuple(range(1, 21))


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 4000), st.integers(1, 50), st.integers(1, 600))
def test_padding_keeps_both_limits(minimum: int, step: int, more: int, percent: int, pad_max: int) -> None:
    found = pad(AxisSpan(minimum, step, minimum + more, (), pad_max, percent))
    for low, high in itertools.pairwise(found):
        # Sizes that are neighbours in steps can be no closer.
        assert high - low <= max(step, pad_max, low) and (high - low <= 2 * step or high - low <= pad_max)


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"VLLM_MULTIMODAL_BUCKETS": "1600,3000"}, ["VLLM_MULTIMODAL_BUCKETS", "'3000'", "divisible by 64"]),
        ({"VLLM_MULTIMODAL_BUCKETS": "1600;3136"}, ["VLLM_MULTIMODAL_BUCKETS", "1600;3136"]),
        ({"VLLM_MULTIMODAL_BUCKETS": "none"}, ["VLLM_MULTIMODAL_BUCKETS", "'none'"]),
        ({"VLLM_MULTIMODAL_BUCKETS": " , "}, ["VLLM_MULTIMODAL_BUCKETS", "no bucket"]),
        ({"VLLM_MULTIMODAL_BUCKETS": "0"}, ["'0'", "positive"]),
        ({"VLLM_PROMPT_BS_BUCKET_MIN": "9", "VLLM_PROMPT_BS_BUCKET_MAX": "8"},
         ["VLLM_PROMPT_BS_BUCKET_MIN=9", "VLLM_PROMPT_BS_BUCKET_MAX=8"]),
        ({"VLLM_DECODE_BS_BUCKET_STEP": "0"}, ["VLLM_DECODE_BS_BUCKET_STEP=0", "at least 1"]),
        ({"VLLM_DECODE_BLOCK_BUCKET_MAX": "many"}, ["VLLM_DECODE_BLOCK_BUCKET_MAX='many'", "whole number"]),
        ({"VLLM_PROMPT_SEQ_BUCKET_PAD_PERCENT": "60"}, ["VLLM_PROMPT_SEQ_BUCKET_PAD_PERCENT=60", "0..50"]),
        ({"VLLM_BUCKETING_STRATEGY": "linear"}, ["VLLM_BUCKETING_STRATEGY='linear'", "exp, lin, pad"]),
        ({"VLLM_EXPONENTIAL_BUCKETING": "ture"}, ["VLLM_EXPONENTIAL_BUCKETING='ture'", "neither true"]),
        ({"VLLM_BUCKETING_FROM_FILE": "/nowhere/x"}, ["VLLM_BUCKETING_FROM_FILE=/nowhere/x", "No such file"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_name_value_and_rule(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(StartupError) as error:
        read_bucket_options(environ)
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


@pytest.mark.parametrize(
    "line", ["(1, 2)", "1, 2, x", "(1, range(5), 0)", "(1, range(0, 99999), 2)", "(0, 1, 1)", "__import__('os')",
             "(1, range(4, 2), 0)", "(1, [], 3)", "(1, 'a', 3)", "(True, 1, 1)"],
)  # fmt: skip
def test_malformed_files_name_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "buckets"
    path.write_text(f"# comment\n(1, 128, 0)\n{line}\n")
    with pytest.raises(StartupError, match="line 3"):
        read_bucket_options({"VLLM_BUCKETING_FROM_FILE": str(path)})


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(StartupError, match="no bucket"):
        read_bucket_options({"VLLM_BUCKETING_FROM_FILE": str(tmp_path / "empty")})


def test_older_names_and_the_older_switch() -> None:
    requested = read_bucket_options({"VLLM_PROMPT_SEQ_BUCKET_MIN": "256", "VLLM_PROMPT_QUERY_BUCKET_MAX": "4096"})
    assert (requested.axis("prompt_query").minimum, requested.axis("prompt_query").maximum) == (256, 4096)
    both = read_bucket_options({"VLLM_PROMPT_SEQ_BUCKET_MIN": "256", "VLLM_PROMPT_QUERY_BUCKET_MIN": "128"})
    assert both.axis("prompt_query").minimum == 128
    assert both.notes == ("VLLM_PROMPT_SEQ_BUCKET_MIN=256 has no effect: VLLM_PROMPT_QUERY_BUCKET_MIN=128 wins.",)
    assert read_bucket_options({"VLLM_EXPONENTIAL_BUCKETING": "no"}).strategy == "lin"
    clash = read_bucket_options({"VLLM_EXPONENTIAL_BUCKETING": "true", "VLLM_BUCKETING_STRATEGY": "pad"})
    assert clash.strategy == "exp" and "wins" in clash.notes[0]
    assert read_bucket_options({"VLLM_BUCKETING_STRATEGY": " PAD "}).strategy == "pad"


def test_padding_variables_without_effect_say_so() -> None:
    assert read_bucket_options({"VLLM_DECODE_BS_BUCKET_PAD_MAX": "8"}).notes == (
        "VLLM_DECODE_BS_BUCKET_PAD_MAX has no effect with the exp strategy.",
    )


def test_spaces_after_commas() -> None:
    assert read_bucket_options({"VLLM_MULTIMODAL_BUCKETS": " 3136, 1600 ,4096"}).vision == (1600, 3136, 4096)
    assert read_bucket_options({}) == BucketOptions(axes=read_bucket_options({}).axes)


def test_a_maximum_below_one_full_length_row_is_raised() -> None:
    environ = {"VLLM_PROMPT_SEQ_BUCKET_MAX": "1024", "VLLM_DECODE_BLOCK_BUCKET_MAX": "8",
               "VLLM_PROMPT_CTX_BUCKET_MAX": "3", "VLLM_DECODE_BS_BUCKET_MAX": "4"}  # fmt: skip
    plan = make_plan(SERVING, LIMITS, read_bucket_options(environ))
    raised = [n.split(" is raised to ")[0] for n in plan.notes]
    assert raised == [
        "VLLM_PROMPT_SEQ_BUCKET_MAX=1024",
        "VLLM_PROMPT_CTX_BUCKET_MAX=3",
        "VLLM_DECODE_BLOCK_BUCKET_MAX=8",
    ]
    assert plan.sizes(Stage.FRESH, 1)[-1] == 4096 and plan.sizes(Stage.DECODE, 0)[-1] == 4
    assert plan.sizes(Stage.SAMPLE)[-1] == 64


def test_minimum_and_maximum_bound_the_exponential_range() -> None:
    requested = read_bucket_options(
        {"VLLM_PROMPT_BS_BUCKET_MAX": "2", "VLLM_PROMPT_SEQ_BUCKET_MIN": "512", "VLLM_DECODE_BS_BUCKET_MIN": "8"}
    )
    plan = make_plan(SERVING, LIMITS, requested)
    assert plan.sizes(Stage.FRESH, 0) == (1, 2) and plan.sizes(Stage.FRESH, 1)[0] == 512
    assert plan.sizes(Stage.DECODE, 0)[0] == 8


def test_every_bucket_variable_is_in_the_table() -> None:
    for axis in ("PROMPT_BS", "PROMPT_SEQ", "PROMPT_QUERY", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK"):
        for bound in ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT"):
            assert envs.BY_NAME[f"VLLM_{axis}_BUCKET_{bound}"].effect == envs.READ


def test_padded_lists_pad_less_than_powers_of_two() -> None:
    plan, _ = plan_of("3000, padding")
    tokens = plan.sizes(Stage.FRESH, 1)
    assert all(b - a <= 512 for a, b in itertools.pairwise(tokens))
