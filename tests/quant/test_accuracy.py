"""What quantised weights cost in answers: the demo's held-out questions, asked of the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from benchmarks.harness.common import environment
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {
    "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 32, "max_model_len": 2048, "dtype": "bfloat16",
    "mm_processor_cache_gb": 0.1,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=48)
BARS = {"int8": (0.5, 99.7), "fp8": (1.0, 99.5), "int4": (2.5, 99.0)}
"""Points of exact answers that may be lost, and the least teacher-forced agreement in per cent."""


class Answered(NamedTuple):
    right: list[bool]
    tokens: list[list[int]]


@cache
def asked(count: int) -> list[tuple[list[dict[str, Any]], str]]:
    """(chat, the right answer) of held-out questions, in wordings that the model never saw."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from demo.language.held_out import items
        from demo.language.tokenizer import SYSTEM
    finally:
        sys.path.remove(str(ROOT / "tools"))
    found = []
    for item in items(count):
        parts: list[dict[str, Any]] = [{"type": "image", "image": Image.fromarray(p.pixels)} for p in item.pictures]
        parts.append({"type": "text", "text": item.wordings[1]})
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]
        found.append((chat, item.answer))
    return found


@cache
def answered(method: str, count: int) -> Answered:
    llm = LLM(str(demo_path()), **BASE, quantization=method)
    questions, right, tokens = asked(count), [], []
    for start in range(0, len(questions), 64):
        part = questions[start : start + 64]
        for out, (_, wanted) in zip(llm.chat([chat for chat, _ in part], PARAMS, use_tqdm=False), part, strict=True):
            right.append(out.outputs[0].text == wanted)
            tokens.append(list(out.outputs[0].token_ids))
    llm.close()
    return Answered(right, tokens)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Per cent of tokens that are the reference's own after the reference's tokens: a text counts up to its first
    difference, since after it the two texts are no longer the same."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        for i in range(max(len(a), len(b))):
            equal = i < len(a) and i < len(b) and a[i] == b[i]
            same, total = same + equal, total + 1
            if not equal:
                break
    return 100 * same / total


def measured(method: str, count: int) -> tuple[float, float]:
    """(points of exact answers lost, agreement in per cent), printed."""
    plain, ours = answered("", count), answered(method, count)
    lost = 100 * (sum(plain.right) - sum(ours.right)) / len(plain.right)
    agreed = agreement(ours.tokens, plain.tokens)
    share = 100 * sum(plain.right) / len(plain.right)
    print(
        f"{method}: {len(plain.right)} questions, 16 bits {share:.1f} % exact, lost {lost:+.2f}, agree {agreed:.2f} %"
    )
    return lost, agreed


@pytest.mark.parametrize("method", ["int8"])
def test_few_answers_are_lost(method: str) -> None:
    """A sample of the long test; its bars are wider, since one question is two points."""
    lost, agreed = measured(method, 48)
    assert lost <= 4.2 and agreed >= 98.5


@pytest.mark.long
@pytest.mark.parametrize("method", BARS)
def test_few_answers_are_lost_long(method: str) -> None:
    lost, agreed = measured(method, int(os.environ.get("TRENCADIS_TEST_PROMPTS", "2000")))
    assert lost <= BARS[method][0] and agreed >= BARS[method][1]


@pytest.mark.long
def test_the_benchmark_runs() -> None:
    command = [sys.executable, "-P", "-m", "benchmarks.quantised", "--smoke", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "int4 / bfloat16" in done.stdout
