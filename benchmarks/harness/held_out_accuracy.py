"""What fewer bits cost in answers: the demo's held-out questions, asked of the engine in each form.

A form is a set of options of ``LLM`` (``python -m benchmarks.quantised --questions 2000``).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.reporting import table

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {
    "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 32, "max_model_len": 2048, "dtype": "bfloat16",
    "mm_processor_cache_gb": 0.1,
}  # fmt: skip
LONGEST = 48
"""Tokens of an answer."""


class Bar(NamedTuple):
    """Points of exact answers that may be lost, and the least teacher-forced agreement in per cent."""

    lost: float
    agreed: float


WAYS: dict[str, tuple[dict[str, Any], Bar]] = {
    "int8": ({"quantization": "int8"}, Bar(0.5, 99.7)),
    "fp8": ({"quantization": "fp8"}, Bar(1.0, 99.5)),
    "int4": ({"quantization": "int4"}, Bar(2.5, 99.0)),
    "int8 KV": ({"kv_cache_dtype": "int8"}, Bar(0.5, 99.7)),
    "fp8 KV": ({"kv_cache_dtype": "fp8"}, Bar(1.0, 99.5)),
}
"""Form -> options of ``LLM``, and what it may cost."""


class Answered(NamedTuple):
    """Of each question, whether the answer is exact, and its tokens."""

    right: list[bool]
    tokens: list[list[int]]


@cache
def ask(count: int) -> list[tuple[list[dict[str, Any]], str]]:
    """(chat, the right answer) of held-out questions, in wordings that the model never saw."""
    from PIL import Image

    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from demo.language.held_out import items
        from demo.language.tokenizer import SYSTEM
    finally:
        sys.path.remove(str(ROOT / "tools"))
    found = []
    for item in items(count):
        parts: list[dict[str, Any]] = [{"type": "image", "image": Image.fromarray(p.pixels)} for p in item.images]
        parts.append({"type": "text", "text": item.wordings[1]})
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]
        found.append((chat, item.answer))
    return found


def answered(count: int, model: str = "", **options: Any) -> Answered:
    """What the demo, or another checkpoint, answers with these options of ``LLM``.

    Raises:
        StartupError: this build refuses an option.
    """
    from trencadis import LLM, SamplingParams
    from trencadis.assets import demo_path

    questions, right, tokens = ask(count), [], []
    params = SamplingParams(temperature=0, max_tokens=LONGEST)
    with LLM(model or str(demo_path()), **{**BASE, **options}) as llm:
        for start in range(0, len(questions), 64):
            part = questions[start : start + 64]
            outs = llm.chat([chat for chat, _ in part], params, use_tqdm=False)
            for out, (_, wanted) in zip(outs, part, strict=True):
                right.append(out.outputs[0].text == wanted)
                tokens.append(list(out.outputs[0].token_ids))
    return Answered(right, tokens)


def agreement(ours: list[list[int]], expected: list[list[int]]) -> float:
    """Per cent of tokens that are the reference's own after the reference's tokens: a text counts up to its first
    difference, since after it the two texts are no longer the same."""
    same = total = 0
    for a, b in zip(ours, expected, strict=True):
        for i in range(max(len(a), len(b))):
            equal = i < len(a) and i < len(b) and a[i] == b[i]
            same, total = same + equal, total + 1
            if not equal:
                break
    return 100 * same / total


class Cost(NamedTuple):
    """Exact answers in per cent, points below the reference's, and agreement in per cent."""

    exact: float
    lost: float
    agreed: float


def cost(ours: Answered, reference: Answered) -> Cost:
    """What a form costs beside 16 bits."""
    exact, plain = (100 * sum(found.right) / len(found.right) for found in (ours, reference))
    return Cost(exact, plain - exact, agreement(ours.tokens, reference.tokens))


def _share(value: float) -> str:
    """Per cent with two decimals: a question of 2,000 is 0.05."""
    return f"{value:.2f}"


class Kept:
    """What forms answered, in a file that a run which was stopped goes on from; another code or count starts anew.

    Args:
        path: JSON; None: nothing is kept.
    """

    def __init__(self, path: Path | None, count: int) -> None:
        self.path, self.head = path, {"count": count, "sources": sources()}
        self.found: dict[str, list[Any]] = {}
        if path is not None and path.is_file():
            held = json.loads(path.read_text(encoding="utf-8"))
            if {key: held[key] for key in self.head} == self.head:
                self.found = held["answers"]

    def answered(self, name: str, **options: Any) -> Answered:
        """``answered``, or what the file has."""
        if name not in self.found:
            self.found[name] = list(answered(self.head["count"], **options))
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                work = self.path.with_suffix(".part")
                work.write_text(json.dumps({**self.head, "answers": self.found}), encoding="utf-8")
                work.replace(self.path)
        right, tokens = self.found[name]
        return Answered(right, tokens)


def sources() -> str:
    """A digest of the code that answers."""
    found = hashlib.sha256()
    for folder in ("core", "backends", "multimodal", "server", "tools/demo"):
        for file in sorted((ROOT / folder).rglob("*.[cph]*")):
            if file.suffix in (".py", ".c", ".h"):
                found.update(file.read_bytes())
    return found.hexdigest()


def report(count: int, ways: Sequence[str], kept: Path | None = None) -> str:
    """A row for each form; those that this build refuses are named and left out.

    Each is said on stderr as it comes. ``kept``: where answers stay, so that a run that was stopped goes on.
    """
    from trencadis.core.errors import StartupError

    known = Kept(kept, count)
    reference, said = known.answered("16 bits"), list[str]()
    rows: list[tuple[Any, ...]] = [("16 bits", _share(100 * sum(reference.right) / count), "", "", "", "")]
    for name in ways:
        options, bar = WAYS[name]
        begun = time.monotonic()
        try:
            found = cost(known.answered(name, **options), reference)
        except StartupError as error:
            said.append(f"{name}: left out: {error}")
            continue
        exact, lost, agreed = map(_share, found)
        rows.append((name, exact, lost, bar.lost, agreed, bar.agreed))
        print(f"{name}: exact {exact}, lost {lost}, agree {agreed} ({time.monotonic() - begun:.0f} s)", file=sys.stderr)
    return "\n".join([*said, table(("form", "exact %", "lost", "at most", "agree %", "at least"), rows)])
