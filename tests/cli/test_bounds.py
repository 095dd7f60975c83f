"""Every flag that takes a number has bounds, on the command line, in a file and offline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import from_command_line
from trencadis import LLM
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.server.config import resolve_settings
from trencadis.server.config.flag_table_and_lookup import NUMBERS, get_flag_table
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.config.server_config import ServerConfig

NAMES = [flag.name for flag in get_flag_table().values() if flag.kind in NUMBERS]


def given(name: str, value: Any) -> Settings:
    return from_command_line([f"--{name.replace('_', '-')}={value}"], {})


def test_each_numeric_flag_has_bounds_and_a_default_within() -> None:
    assert set(NAMES) == {flag.name for flag in get_flag_table().values() if flag.bound is not None}
    resolve_settings.check_numbers(EngineConfig())
    resolve_settings.check_numbers(ServerConfig())


@pytest.mark.parametrize("name", NAMES)
def test_values_beyond_the_bounds_are_refused(name: str) -> None:
    bound, flag = get_flag_table()[name].bound, f"--{name.replace('_', '-')}"
    assert bound is not None
    beyond = [-(10**19), 10**19, 2 * bound.most + 1, "inf", "nan", "x"]
    if name not in ("max_model_len", "max_logprobs"):  # where -1 is "as much as can be", as elsewhere
        beyond += [-1] if name != "seed" else []
    beyond += [bound.least] if bound.above else []
    beyond += [bound.most] if bound.below else []
    for value in beyond:
        with pytest.raises(StartupError) as caught:
            given(name, value)
        assert flag in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["max_num_seqs", "max_num_batched_tokens", "block_size", "threads"])
def test_minus_one_is_no_word_for_the_default(flag: str) -> None:
    with pytest.raises(StartupError, match=f"--{flag.replace('_', '-')} must be positive, got -1"):
        given(flag, -1)
    assert given("max_model_len", -1).engine.max_model_len is None


def test_a_file_has_the_same_bounds(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max-num-seqs: -1\n")
    with pytest.raises(StartupError, match="--max-num-seqs must be positive"):
        from_command_line(["--config", str(file)], {})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_num_seqs": -1}, "--max-num-seqs must be positive"),
        ({"max_num_seqs": 1.5}, "max_num_seqs: '1.5' is not a whole number"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization: 'nan' is not a number"),
        ({"threads": True}, "threads: True does not fit --threads"),
    ],
)
def test_offline_too(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        LLM("/nowhere", **flags)


def test_a_line_about_a_variable_names_it() -> None:
    with pytest.raises(StartupError, match=r"VLLM_IMAGE_FETCH_TIMEOUT=-1 must be positive\."):
        from_command_line([], {"VLLM_IMAGE_FETCH_TIMEOUT": "-1"})
    with pytest.raises(StartupError, match=r"VLLM_GRAPH_RESERVED_MEM=1 must be in \[0, 1\)\."):
        from_command_line([], {"VLLM_GRAPH_RESERVED_MEM": "1"})
