"""What Triton compiles is counted, by kernel, beside whoever else listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from trencadis.backends.cuda.cuda_runtime import CompileCounter


def test_counts_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(CompileCounter, "_watching", False)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: heard.append(event["repr"]))
    first = CompileCounter()

    def compiled(name: str) -> None:
        hook: Any = knobs.runtime.jit_post_compile_hook
        hook(key="", repr=name, fn=SimpleNamespace(name=name), compile={}, is_manual_warmup=False)

    compiled("norm")
    second = CompileCounter()
    compiled("norm")
    compiled("head")
    assert (first.count(), second.count()) == (3, 2)
    assert second.names() == {"norm": 1, "head": 1} and heard == ["norm", "norm", "head"]
