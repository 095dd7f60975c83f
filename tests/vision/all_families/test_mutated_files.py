"""Mutated files of every family: each is refused in one line, or images are made as transformers makes them."""

from __future__ import annotations

import json
import random
import shutil
import time
from codecs import BOM_UTF8
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.vision.vision_models import KINDS
from tests.hostile.mutated_files import FILES, mutate
from tests.vision.all_families.family_list import WRITERS
from tests.vision.extra_families import minicpmv, phi3_v
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of, image_needs, image_processor
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.multimodal.processor_interface import PreparedImage

WITHIN = 5.0
"""Seconds of the processor: five times the bar."""
SOME = ("phi3_v", "internvl", "qwen3_vl")
MARK = dict.fromkeys((("idefics3", "smolvlm"), ("smolvlm", "idefics3")), "max_image_size")
"""What tells families apart whose processors are one class under two names."""
LINES = ("pixtral", "mistral3")
"""Families whose processor overrides the image processor's own size of a patch."""
IMAGES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8))
    for i, size in enumerate(((60, 90), (130, 45)))
]


def served(folder: Path) -> list[PreparedImage]:
    """Everything that a start reads and plans of a processor, and two images; raises StartupError."""
    config = load_config(folder)
    if config.vision is None:
        raise StartupError("text alone")
    needs = image_needs(config, {})
    made = image_processor(config, {})
    limits = ShapeLimits(
        4, 256, 256, 128, needs.slots, max(needs.least_slots, 1), needs.tile, needs.squares,
        units=4 if config.text.cross_attention_layers else 0,
    )  # fmt: skip
    assert make_plan(policy(""), limits, BucketOptions(), config).buckets
    found = []
    for image in IMAGES:
        outline = made.compute_geometry(image.height, image.width)
        one = made.prepare(image, "d")
        assert (one.tokens, one.slots, one.grid) == (outline.tokens, outline.slots, outline.grid)
        assert one.slots <= needs.slots * outline.grid[0] and one.tokens <= max(needs.tokens, 1) * 4
        assert one.pixels.shape[1] == made.values == config.vision.slot.values
        found.append(one)
    return found


def mutated(family: str, source: Path, target: Path, seed: int, others: list[Path]) -> str:
    """A copy of ``source`` without weights and with a mutation; returns what it is."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in (*FILES, "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    return mutate(target, random.Random(f"{family} {seed}"), others)


def unlike(family: str, folder: Path, image: Image.Image, one: PreparedImage) -> str:
    """Where pixels are not those of transformers' processor with the same files; empty: nowhere."""
    config = load_config(folder)
    if family_of(config.architecture).model_type != {"pixtral": "llava", "minicpmv": "minicpmv4_6"}.get(family, family):
        return ""  # another family's config.json
    ours = image_processor(config, {})
    if family == "phi3_v":
        phi3_v.same_values(ours, phi3_v.Processor(folder), image)
        return ""
    if family == "minicpmv":
        minicpmv.same_values(ours, minicpmv.open_processor(folder), image)
        return ""
    module, _, name = KINDS[family].processor.rpartition(".")
    more: dict[str, Any] = {"crop_to_patches": True} if family == "internvl" else {}  # as its processor asks
    own = {"patch_size": dict.fromkeys(("height", "width"), ours.patch * ours.merge)} if family in LINES else {}
    made: Any = getattr(import_module(f"transformers.models.{module}"), name).from_pretrained(folder, **own)
    reference = np.asarray(made(images=[image], return_tensors="np", **more)["pixel_values"])
    channel = np.repeat(np.arange(3), one.pixels.shape[1] // 3)
    if family.startswith("qwen"):
        return "" if np.array_equal(ours.normalised_values[channel, one.pixels], reference) else "other pixels"
    whole, tiles = reference.reshape(-1, *reference.shape[-3:]), one.items or (one,)
    if family == "mllama":  # tiles that an image leaves empty stand behind its own
        mine = ours.normalised_values[channel, one.pixels].reshape(-1, ours.rows_per_tile, ours.values)
        same = [
            np.array_equal(tile, ours.cut_patches(t.transpose(1, 2, 0))) for tile, t in zip(mine, whole, strict=False)
        ]
        return "" if all(same) and not whole[len(mine) :].any() else "other pixels"
    if len(tiles) != len(whole) and family != "llava_next":  # tiles of padding alone are not computed there
        return f"{len(tiles)} tiles, not {len(whole)}"
    left = iter(whole)
    for tile in tiles:
        mine = ours.normalised_values[channel, tile.pixels]
        if not any(np.array_equal(mine, ours.cut_patches(values.transpose(1, 2, 0))) for values in left):
            return "other pixels"
    return ""


def problem(family: str, folder: Path) -> str:
    """``refused``, ``served``, or what is wrong."""
    begun = time.process_time()
    try:
        images = served(folder)
        found = "served"
    except (StartupError, BadRequest) as error:
        found = "refused" if 0 < len(str(error)) < 1500 and "\n" not in str(error) else f"says {str(error)[:300]!r}"
    except Exception as error:  # any: it would be a traceback at the start
        found = f"raises {type(error).__name__}: {str(error)[:200]}"
    if (took := time.process_time() - begun) >= WITHIN:
        return f"takes {took:.1f} s"
    if found != "served":
        return found
    try:
        pairs = zip(IMAGES, images, strict=True)
        return next((bad for image, one in pairs if (bad := unlike(family, folder, image, one))), found)
    except Exception as error:  # any: transformers refuses in many ways
        if any((folder / name).read_bytes().startswith(BOM_UTF8) for name in FILES):
            return found  # JSON that an editor of Windows saved is read here
        return f"is served, and transformers says {type(error).__name__}: {str(error)[:150]}"


def attacked(family: str, seeds: range, folders: Any, tmp_path: Path, others: list[Path]) -> Counter[str]:
    counts, wrong = Counter[str](), []
    for seed in seeds:
        what = mutated(family, folders(family), tmp_path / "case", seed, others)
        found = problem(family, tmp_path / "case")
        counts[found if found in ("refused", "served") else "wrong"] += 1
        if found not in ("refused", "served"):
            wrong.append(f"{seed}: {what}: {found}")
    assert not wrong, f"{len(wrong)} of {len(seeds)}\n" + "\n".join(wrong[:40])
    return counts


def kind_of(folder: Path) -> str:
    """The class that a processor's file names, whatever computes it."""
    named: str = json.loads((folder / FILES[1]).read_text())["image_processor_type"]
    return named.removesuffix("Fast")


@pytest.mark.long
@pytest.mark.parametrize("family", WRITERS)
def test_a_processor_of_another_family_is_refused(family: str, folders: Any, tmp_path: Path) -> None:
    for other in WRITERS:
        if kind_of(folders(other)) != kind_of(folders(family)):
            folder = tmp_path / other
            mutated(family, folders(family), folder, 0, [])
            for name in FILES:
                source = folders(family) if name == FILES[0] else folders(other)
                shutil.copyfile(source / name, folder / name)
            (folder / "processor_config.json").unlink(missing_ok=True)
            with pytest.raises(StartupError, match=MARK.get((family, other), "image_processor_type")) as refused:
                served(folder)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", SOME)
def test_mutated_files_are_refused_in_a_line_or_served(family: str, folders: Any, tmp_path: Path) -> None:
    counts = attacked(family, range(20), folders, tmp_path, [])
    assert counts["refused"] > 5 and counts["served"] > 2


@pytest.mark.long
@pytest.mark.parametrize("family", WRITERS)
def test_two_thousand_mutated_files(family: str, folders: Any, tmp_path: Path) -> None:
    counts = attacked(family, range(2000), folders, tmp_path, [folders(name) for name in WRITERS if name != family])
    print(f"\n{family}: {dict(counts)}")
    assert counts["refused"] > 500 and counts["served"] > 200
