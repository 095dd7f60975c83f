"""The kernels of a card take what every form of every family gives them, in launches of one token, a few, and many.

Launches are recorded with the checks of their launchers instead of run, over tensors without memory: the twin of a card
runs other operations, and the interpreter tests kernels alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.text_checkpoints import CASES
from trencadis.core.checkpoint.config_reader import load_config

SOME = ("qwen3_5", "qwen3_next", "gemma4", "gpt_oss", "lfm2", "nemotron_h")
"""Families of which the first form is recorded in each run of the tests."""
FIRST = {family: name for family, name in reversed(CASES)}


def is_quick(family: str, name: str) -> bool:
    return family in SOME and FIRST[family] == name


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.long) for case in CASES],
    ids=lambda value: value.replace(" ", "-"),
)
def test_launches_of_any_size(form: Any, family: str, name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from trencadis.backends.cuda.time_estimates.meta_launch_recorder import DecodeRecorder

    recorder = DecodeRecorder(load_config(form(family, name)))
    for rows in (1, 4, 32):
        assert len(recorder.step(rows, 100)) > 5
    for tokens in (1, 100):
        (launch,) = recorder.prompt(tokens)
        assert len(launch) > 5
