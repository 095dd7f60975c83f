"""Graphs of a card's twin that see images: one call a layer, which reads rows of the arena where they lie."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.vision.cross_attention.mllama_oracle import FIRST
from tests.vision.cross_attention.test_chats import chats
from trencadis.backends.cuda.cpu_twin.twin_recording import TwinRecording
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
from trencadis.core.cross_attention_inputs import VARIANT

FLAGS: dict[str, Any] = {
    "device": "cuda", "policy": "twin", "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 2,
    "encoder_cache_images": 4,
}  # fmt: skip


def test_a_graph_attends_to_images_in_one_call_a_layer(
    path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured launches answer as transformers does; of five layers two see."""
    found: list[Counter[str]] = []
    replays = Counter[str]()

    def close(tape: TwinRecording, out: Any, was: Any = TwinRecording.close) -> None:
        found.append(Counter(func.overloadpacket.__name__ for func, *_ in tape.steps))
        was(tape, out)

    def replay(device: TwinRuntime, graph: Any, was: Any = TwinRuntime.replay) -> None:
        replays[VARIANT if VARIANT in graph.name else ""] += 1
        was(device, graph)

    monkeypatch.setattr(TwinRecording, "close", close)
    monkeypatch.setattr(TwinRuntime, "replay", replay)
    chats(path, reference(FIRST), range(4), **FLAGS)
    cross_attention = [calls for calls in found if calls["attend_pictures"]]
    assert len(cross_attention) >= 4 and replays[VARIANT] > 10 and replays[""] > 10, replays
    assert all(calls["attend_pictures"] == 2 and calls["attend"] == 3 for calls in cross_attention)
    plain = [calls for calls in found if calls["attend"] and not calls["attend_pictures"]]
    gathered = {calls["index_select"] for calls in plain}
    assert {calls["index_select"] for calls in cross_attention} == gathered, "no more rows are gathered than for text"
