"""The variables that log what a launch compiled or sent back to the host."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trencadis.backends.hpu.backend import StepLog
from trencadis.core.errors import StartupError

pytestmark = pytest.mark.part("gaudi")

COMPILES, FALLBACKS = "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION", "VLLM_HPU_LOG_STEP_CPU_FALLBACKS"


class Card:
    """Counters as the plug-in has them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ops: dict[str, int] = {}
        self.opened: list[str] = []

    @contextmanager
    def metric(self, name: str) -> Iterator[Any]:
        self.opened.append(name)
        card = self

        class Metric:
            def stats(self) -> list[tuple[str, Any]]:
                rest = ("FallbackOps", card.ops) if name == "cpu_fallback" else ("TotalTime", 7)
                return [("TotalNumber", card.counts[name]), rest]

        yield Metric()


def launch(log: StepLog, card: Card, name: str, **events: int) -> None:
    log.begin(name)
    card.counts.update(events)


def test_a_line_names_the_launch_that_compiled(caplog: pytest.LogCaptureFixture) -> None:
    card = Card()
    log = StepLog({COMPILES: "true"}, card.metric)
    assert card.opened == ["graph_compilation"]
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        launch(log, card, "fresh (4, 128)", graph_compilation=3, cpu_fallback=1)
        launch(log, card, "sample (4)")
        log.end()
        card.counts.update(graph_compilation=9)  # by background warm-up
        launch(log, card, "sample (4)")
        log.end()
    (line,) = caplog.messages
    assert line.startswith("VLLM_HPU_STEP_GRAPH_COMPILATION: fresh (4, 128), events 3") and "'TotalNumber': 3" in line


def test_a_fallback_names_the_operation_and_all_means_every_launch(caplog: pytest.LogCaptureFixture) -> None:
    card = Card()
    log = StepLog({FALLBACKS: "1", f"{COMPILES}_ALL": "1"}, card.metric)
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        launch(log, card, "decode (8, 64)", cpu_fallback=1)
        card.ops["aten::index.Tensor_out"] = 1
        log.end()
        launch(log, card, "decode (8, 64)")
        log.end()
    assert [line.split(":")[0] for line in caplog.messages] == [
        "VLLM_HPU_STEP_GRAPH_COMPILATION", "VLLM_HPU_STEP_CPU_FALLBACK", "VLLM_HPU_STEP_GRAPH_COMPILATION",
    ]  # fmt: skip
    assert "index.Tensor_out" in caplog.messages[1] and "events 0" in caplog.messages[2]


def test_nothing_is_opened_or_read_where_nothing_is_asked() -> None:
    card = Card()
    launch(StepLog({COMPILES: "false"}, card.metric), card, "x", graph_compilation=1)
    assert not card.opened
    with pytest.raises(StartupError, match="neither true"):
        StepLog({COMPILES: "perhaps"}, card.metric)


def test_a_real_launch_is_logged(hpu: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated card: the first run of a bucket compiles, the second does not."""
    import numpy as np

    from tests.oracles import gaudi_launches as ops
    from trencadis.core.buckets import Bucket

    monkeypatch.setenv(COMPILES, "1")
    backend = hpu(block_size=ops.BLOCK)
    stage, dims, lengths = next(iter(ops.LAUNCHES.values()))
    inputs = ops.step_inputs(lengths, np.random.default_rng(1))
    program = backend.program(Bucket(stage, dims), ops.AttentionLayer(backend, 0.0))
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        for _ in range(2):
            backend.fill(program, inputs)
            program.run()
        backend._steplog.end()
    (line,) = [m for m in caplog.messages if m.startswith("VLLM_HPU_STEP")]
    assert str(Bucket(stage, dims)) in line
