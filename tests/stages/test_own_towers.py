"""``--mm-encoder-tp-mode data``: pictures are dealt to ranks by slots, and every rank reads the rows of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.oracles.transformers_model import assert_same
from tests.parallel.test_same_tokens import BASE, answered
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.backends.hpu.policy import SERVING
from trencadis.core.checkpoint.pooler_config import load_model
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.ranks import shares
from trencadis.core.launches.encoding import dealt
from trencadis.core.memory.host_plan import weights_bytes
from trencadis.core.shapes.stages import check_ranks
from trencadis.core.step import Encode

DATA: dict[str, Any] = dict(tensor_parallel_size=2, mm_encoder_tp_mode="data")


def image(name: str, slots: int) -> Encode:
    rows = np.arange(slots // 4, dtype=np.int32)
    return Encode(name, (1, 8, slots // 8), slots, np.zeros((slots, 4), np.uint8), rows)


def test_pictures_are_dealt_by_slots() -> None:
    images = [image(str(i), slots) for i, slots in enumerate([64, 512, 128, 320, 64])]
    found = dealt(images, 2)
    assert [sorted(i.digest for i in share) for share in found] == [["1", "4"], ["0", "2", "3"]]
    assert dealt(images, 2) == found and [len(s) for s in dealt(images[:1], 3)] == [1, 0, 0]


def test_two_ranks_with_towers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one rank; the rank in this process encodes some of the pictures, and some launches none."""
    one = LLM(str(demo_path()), **BASE)
    wanted, _ = answered(one, range(6))
    one.close()
    llm = LLM(str(demo_path()), **BASE, **DATA)
    try:
        runner: Any = llm.engine.executor._rank  # type: ignore[attr-defined]
        packed, pack = list[int](), runner.model.pack

        def noted(images: Any, slots: int) -> Any:
            packed.append(len(images))
            return pack(images, slots)

        monkeypatch.setattr(runner.model, "pack", noted)
        ours, _ = answered(llm, range(6))
        assert_same([(a.tokens, b) for a, b in zip(ours, wanted, strict=True)])
        encoded = llm.engine.scheduler.encoder.encoded
        assert 0 < sum(packed) < encoded
        assert runner.model.tower.blocks[0].width == runner.model.config.vision.hidden
    finally:
        llm.close()


def test_what_towers_cost_and_where_there_are_none() -> None:
    flags: dict[str, Any] = dict(model=str(demo_path()), device="cpu", tensor_parallel_size=2)
    shared, own = load_model(EngineConfig(**flags)), load_model(EngineConfig(**flags, mm_encoder_tp_mode="data"))
    assert own.own_towers and not shared.own_towers and own.vision is not None
    assert weights_bytes(own, 4, 2) - weights_bytes(shared, 4, 2) == 4 * own.vision.stored()
    assert shares(own, 2)
    with pytest.raises(StartupError, match=r"--mm-encoder-tp-mode data: ranks of the hpu backend gather no rows"):
        check_ranks(own, "hpu", SERVING)
    assert not load_model(EngineConfig(model=str(demo_path()), mm_encoder_tp_mode="data")).own_towers
