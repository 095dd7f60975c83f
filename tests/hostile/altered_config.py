"""A checkpoint with one key of one JSON file altered, run here and in transformers."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.fakes.hand_driven_model import HandDrivenModel
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of, image_processor, import_object
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import count_slots
from trencadis.server.prompts.prompt_builder import TextService

GONE = object()
"""The value of a key that is taken out."""

Grid = tuple[int, int, int]
GRIDS: tuple[Grid, Grid] = ((1, 10, 18), (2, 4, 6))
"""An image that windows cut, and a video of two temporal patches."""

SECONDS = 1.5


def altered(source: Path, target: Path, file: str, key: str, value: Any) -> Path:
    """A folder with the files of ``source``, but for ``key`` (a path with dots) of ``file``; the others are copies."""
    target.mkdir()
    for one in source.iterdir():
        if one.is_file() and one.name != file:
            shutil.copyfile(one, target / one.name)
    held = json.loads((source / file).read_text()) if (source / file).is_file() else {}
    *outer, last = key.split(".")
    place = held
    for name in outer:
        place = place.setdefault(name, {})
    if value is GONE:
        place.pop(last, None)
    else:
        place[last] = value
    (target / file).write_text(json.dumps(held))
    return target


def verdict(ours: Any, reference: Any, key: str) -> str:
    """``refused`` (naming the key), ``right``, or what is wrong.

    Args:
        ours: makes this engine's values, or raises StartupError.
        reference: makes transformers'.
    """
    try:
        got = ours()
    except StartupError as error:
        *_, parent, last = ("", *key.split("."))
        named = last in str(error) or (parent.startswith("rope") and parent in str(error))
        named = named or "config.json asks" in str(error) or "lacks the weight" in str(error)
        return "refused" if named and "\n" not in str(error) else f"refused without the key: {error}"
    try:
        want = reference()
    except Exception as error:  # any: transformers refuses in many ways
        return f"accepted, and transformers says {type(error).__name__}: {error}"
    if got.shape != want.shape:
        return f"wrong: shape {list(got.shape)}, not {list(want.shape)}"
    away = float((got - want).abs().max() / want.abs().max())
    return "right" if away <= 1e-4 else f"wrong: {away:.1e} of the largest"


class Case:
    """One prompt for a checkpoint: words, and where the model takes them an image and a video.

    ``grids``: of both, (t, h, w) patches.
    """

    def __init__(self, path: Path, source: Path | None = None, grids: tuple[Grid, Grid] = GRIDS) -> None:
        self.path, self.source, self.grids = path, source or path, grids
        raw = json.loads((self.source / "config.json").read_text())
        self.vision = "vision_config" in raw
        values = 6 * raw["vision_config"]["patch_size"] ** 2 if self.vision else 0
        rng = np.random.default_rng(5)
        words = rng.integers(0, 300, 24).tolist()
        self.media = [
            rng.integers(0, 256, (t * h * w, values), dtype=np.uint8) for t, h, w in (grids if self.vision else ())
        ]
        self.ids = words[:9]
        self.kinds = [0] * 9
        for kind, (grid, name) in enumerate(zip(grids, ("image", "video"), strict=True), 1):
            if self.vision:
                count = grid[0] * grid[1] * grid[2] // 4
                self.ids += [raw[f"{name}_token_id"]] * count + words[8 + kind : 9 + kind]
                self.kinds += [kind] * count + [0]
        self.ids += words[12:]
        self.kinds += [0] * (len(self.ids) - len(self.kinds))

    def ours(self) -> torch.Tensor:
        """Logits [n, vocabulary] of this engine; everything that a start reads is read."""
        config = load_config(self.path)
        if config.vision is not None:
            image_processor(config, {})
        TextService.load(config, EngineConfig(model=str(self.path)))
        harness = HandDrivenModel(self.path)
        if not self.vision:
            return harness.prefill(self.ids, 13)
        spans, rows, arena = [], np.zeros(len(self.ids), np.int32), 2
        for kind, (grid, pixels) in enumerate(zip(self.grids, self.media, strict=True), 1):
            offset, count = self.kinds.index(kind), len(pixels) // 4
            spans.append(SimpleNamespace(offset=offset, length=count, grid=grid))
            mine = np.arange(arena, arena + count, dtype=np.int32)
            packed = harness.model.pack([Encode(str(kind), grid, count_slots(grid), pixels, mine)], count_slots(grid))
            harness.run(Stage.VISION, harness.model.vision, packed, count_slots(grid))
            rows[offset : offset + count], arena = mine, arena + count
        assert config.vision is not None
        side = family_of(config.architecture).vision
        assert side is not None
        where, _ = import_object(side.positions)(len(self.ids), spans, config.vision, [None, SECONDS])
        return harness.prefill(self.ids, 41, where, rows)

    def reference(self) -> torch.Tensor:
        """transformers' logits [n, vocabulary] in float32."""
        import transformers

        auto = transformers.AutoModelForImageTextToText if self.vision else transformers.AutoModelForCausalLM
        model = auto.from_pretrained(self.path, dtype=torch.float32).eval()
        ids = torch.tensor([self.ids])
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=ids, **(self._media if self.vision else {})).logits[0]
        return logits

    @cached_property
    def _media(self) -> dict[str, torch.Tensor]:
        from tests.oracles.reference_towers import normalised

        raw = json.loads((self.source / "preprocessor_config.json").read_text())
        normalisation = raw["image_mean"], raw["image_std"]
        image, clip = (normalised(pixels, normalisation) for pixels in self.media)
        return {
            "pixel_values": image,
            "image_grid_thw": torch.tensor(self.grids[:1]),
            "pixel_values_videos": clip,
            "video_grid_thw": torch.tensor(self.grids[1:]),
            "second_per_grid_ts": torch.tensor([SECONDS]),
            "mm_token_type_ids": torch.tensor([self.kinds]),
        }
