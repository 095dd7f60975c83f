"""VISION in lazy mode is warmed up by launches that run; a switch and compile mode keep them in compile-only mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_settings import COLLECTIVES, VISION_OUTSIDE, settings
from trencadis.backends.hpu.launches.hpu_program import LaunchContexts
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, VisionTensors
from trencadis.core.errors import StartupError
from trencadis.core.vision_config import SlotForm

pytestmark = pytest.mark.part("gaudi")


@pytest.mark.parametrize(("lazy", "asked", "inside"), [
    (True, "", 0), (True, "0", 2), (False, "", 1), (False, "1", 0), (True, "1", 0),
])  # fmt: skip
def test_image_launches_run_while_they_are_warmed_up(lazy: bool, asked: str, inside: int) -> None:
    card = EmulatedDevice(profile(""))
    bridge, entered = make_bridge(card, lazy), []

    @contextmanager
    def compile_only() -> Iterator[None]:
        entered.append(1)
        with card.compiling():
            yield

    switches = settings({VISION_OUTSIDE: asked} if asked else {})
    backend = HpuBackend(
        BackendConfig(vocab_size=64), policy(""), dataclasses.replace(bridge, compile_only=compile_only), switches
    )
    backend._contexts = LaunchContexts()  # as on a card: a rehearsal is a launch that runs
    backend.slot = SlotForm(values=12, cell=4)

    def body(x: VisionTensors) -> Any:
        return x.position + 1

    for stage, shape, wanted in ((Stage.VISION, (64,), inside), (Stage.RESET, (1,), 2 if lazy else 1)):
        entered.clear()
        program = backend.program(Bucket(stage, shape), body if stage is Stage.VISION else lambda x: x.slot + 1)
        program.compile()
        program.capture()
        assert len(entered) == wanted, stage


def test_an_unknown_form_of_collectives_is_one_line() -> None:
    assert settings({COLLECTIVES: "eager"}).eager_collectives and not settings({}).eager_collectives
    with pytest.raises(StartupError, match="functional or eager"):
        settings({COLLECTIVES: "lazy"})
