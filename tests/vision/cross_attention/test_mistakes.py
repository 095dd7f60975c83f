"""Mistakes that must show in the first token's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles.transformers_model import make_image
from tests.vision.cross_attention.mllama_oracle import BASE, FIRST, START
from trencadis import LLM, SamplingParams
from trencadis.core.models import model_loader

MISTAKES: dict[str, Callable[[Any, Any], None]] = {}


def mistake(name: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    def note(plant: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        MISTAKES[name] = plant
        return plant

    return note


@mistake("nothing")
def _nothing(model: Any, patch: Any) -> None:
    pass


@mistake("padding windows see each other")
def _unmasked(model: Any, patch: Any) -> None:
    def pack(items: Any, slots: int, was: Any = model.pack) -> Any:
        made = was(items, slots)
        made.padding_window[:] = 0
        return made

    patch.setattr(model, "pack", pack)


@mistake("tiles in another order")
def _order(model: Any, patch: Any) -> None:
    from trencadis.multimodal.mllama import model as module

    patch.setattr(
        module,
        "tile_slot_positions",
        lambda first, tiles, kinds, was=module.tile_slot_positions: was(first, tiles, kinds)[::-1],
    )


@mistake("the output of the next layer")
def _taken(model: Any, patch: Any) -> None:
    object.__setattr__(model.tower, "intermediate_layers", tuple(i + 1 for i in model.tower.intermediate_layers))


@mistake("outputs feature by feature")
def _features(model: Any, patch: Any) -> None:
    object.__setattr__(model.tower, "intermediate_layers", model.tower.intermediate_layers[::-1])


@mistake("a gate without its tangent")
def _gate(model: Any, patch: Any) -> None:
    model.cross_attention_layers[0].gates[0] = model.cross_attention_layers[0].gates[0].atanh()


@mistake("the MLP speaks before the first image")
def _speaks(model: Any, patch: Any) -> None:
    text = model.text

    def loud(inputs: Any) -> None:
        seen = inputs.cross_attention
        text(
            inputs if seen is None else inputs._replace(cross_attention=seen._replace(gate=seen.gate.clamp(max=1) * 2))
        )

    patch.setattr(model, "text", loud)


@mistake("empty tiles are seen behind an image")
def _empty(model: Any, patch: Any) -> None:
    text = model.text

    def wide(inputs: Any) -> None:
        seen = inputs.cross_attention
        every = None if seen is None else (seen.reach > 0).int() * model.tower.cross_attention_rows
        text(inputs if every is None else inputs._replace(cross_attention=seen._replace(reach=every)))

    patch.setattr(model, "text", wide)


@mistake("keys are not normed")
def _keys(model: Any, patch: Any) -> None:
    norm = model.cross_attention_layers[1].attention.norms[1]
    patch.setattr(norm, "heads", lambda x: x)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, path: Path, reference: Any, monkeypatch: Any) -> None:
    rng = np.random.default_rng(3)
    image = make_image(rng, low=32, high=200, aspect=2)
    text = f"{START}Say what <|image|> shows."
    _, answer = reference(FIRST).answer(text, [image], 1)
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:

        def build(*args: Any, was: Any = model_loader.load_model) -> Any:
            model = was(*args)
            MISTAKES[name](model, monkeypatch)
            found.append(model)
            return model

        patch.setattr(model_loader, "load_model", build)
        llm = LLM(str(path), **BASE)
    try:
        assert found
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": image}}
        got = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False)[0]
        first, want = got.outputs[0].logprobs[0], answer.logits[0].log_softmax(-1)  # type: ignore[index]
        off = max(abs(one.logprob - float(want[token])) for token, one in first.items())
        assert (off > 1e-3) == (name != "nothing"), off
    finally:
        llm.close()
