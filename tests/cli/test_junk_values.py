"""Every flag and every variable with values that no operator means: each is taken, or is one line."""

from __future__ import annotations

import time

import pytest

from tests.fakes.command_line import from_command_line
from trencadis.core import envs
from trencadis.core.errors import MAX_LINE, StartupError
from trencadis.server.config.flag_table_and_lookup import get_flag_table, get_flag_variables
from trencadis.server.config.vllm_flag_and_env_table import ROWS

DEEP, LONG = "[" * 5000, "9" * 5000
JUNK = [
    "", "x", " ", "-1", LONG, "1" * 400 + "G", "1e400", "-1e400", "1e308G", "nan", "-inf", "1e-400", "0x10", "\u0663",
    "1,,2", ",", "[]", "{}", DEEP, '{"a":' * 3000, '{"a": ' + DEEP, '{"a": ' + LONG + "}", '{"a":1', "[" + LONG + "]",
    '"x"', "null", "NaN", '{"a": NaN}', '{"image": 1e400}', '{"a": 1, "a": 2}', '{"\\ud800": 1}', '["\\ud800"]',
    "\udcff\udcfe", "a\nb", "\x1b[2J", "\u202e", "=", "a=", "=b", "image=1e9", "4Kk", "9e9G", "-4MiB", "*", "..",
    "~x/y", "http://[", "x" * 100_000, "[[[]]]", '{"x": {"y": {"z": []}}}', "0-99999999999999", "%s%n", "{{7*7}}",
]  # fmt: skip
FLAGS = sorted(get_flag_table())
VARIABLES = sorted({*get_flag_variables(), *(one.name for one in envs.TABLE)})
PARTS = 4


def check(words: list[str], variables: dict[str, str]) -> None:
    start = time.process_time()
    try:
        from_command_line(words, variables)
    except StartupError as error:
        line = str(error)
        assert line.strip() and "\n" not in line and len(line) <= MAX_LINE, (words, variables, line[:300])
    assert time.process_time() - start < 2


@pytest.mark.parametrize("part", range(PARTS))
def test_flags(part: int) -> None:
    for i, name in enumerate(FLAGS[part::PARTS]):
        flag = get_flag_table()[name].written
        for value in JUNK[i % 2 :: 2]:
            check([f"{flag}={value}"], {})


@pytest.mark.parametrize("part", range(PARTS))
def test_variables(part: int) -> None:
    for i, name in enumerate(VARIABLES[part::PARTS]):
        for value in JUNK[i % 3 :: 3]:
            check([], {name: value})


def test_flags_of_vllm() -> None:
    for i, name in enumerate(sorted(ROWS)):
        for value in JUNK[i % 7 :: 7]:
            check([f"--{name.replace('_', '-')}={value}"], {})


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--max-body-bytes", "--kv-cache-memory-bytes", "--max-model-len"])
@pytest.mark.parametrize("value", [LONG, "1e400", "1" * 400 + "G", "1e308G"])
def test_numbers_beyond_all_bounds_name_their_flag(flag: str, value: str) -> None:
    with pytest.raises(StartupError, match=flag):
        from_command_line([flag, value], {})
