"""Random mutations of a checkpoint's JSON files: values, keys, shapes, bytes, and whole files of others."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = ("config.json", "preprocessor_config.json")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 7, 13, 14, 64, 336, 2**31, 2**63, 10**30, -(10**9), 0.0, 0.5, -0.5, 1e-300,
    1e308,
    math.nan, math.inf, -math.inf, "", "x", "14", "true", "no such thing", "\0", "x" * 10_000, [], {}, [0], [1, 2, 3],
    [[1]], [None], ["a", "b", "c"], [[56, 56]] * 500, [0.5] * 3, [0, 0, 0], [0.5] * 4, {"height": 56, "width": 56},
    {"height": 1, "width": 10**6}, {"shortest_edge": 0}, {"longest_edge": 10**9},
    {"shortest_edge": 28, "longest_edge": 1},
    {"height": -14, "width": 14}, {"height": "56", "width": "56"}, {"a": {"b": {"c": 1}}},
)  # fmt: skip
KEYS = (
    "size", "crop_size", "image_size", "patch_size", "merge_size", "min_pixels", "max_pixels", "num_crops", "do_resize",
    "do_pad", "do_center_crop", "do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std", "resample",
    "image_grid_pinpoints", "max_patches", "min_patches", "crop_to_patches", "image_processor", "image_processor_type",
    "processor_class", "temporal_patch_size", "vision_config", "text_config", "image_token_id", "image_token_index",
    "vision_feature_layer", "vision_feature_select_strategy", "head_dim", "hidden_size", "num_hidden_layers",
    "image_seq_length", "scale_factor", "downsample_ratio", "mm_tokens_per_image", "spatial_merge_size",
    "quantization_config",
)  # fmt: skip
BYTES: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 50_000, b"{}",
    b"\0" * 64,
    b'{"size": ' + b"9" * 200_000 + b"}",
)  # fmt: skip


def mutate(folder: Path, rng: random.Random, others: list[Path]) -> str:
    """Changes one or two things in ``folder``'s files; returns what. ``others``: folders whose files may come in."""
    return "; ".join(_once(folder, rng, others) for _ in range(rng.choice((1, 1, 1, 2))))


def _once(folder: Path, rng: random.Random, others: list[Path]) -> str:
    file = folder / rng.choice(FILES)
    how = rng.random()
    if how < 0.06 and others:
        source = rng.choice(others)
        file.write_bytes((source / file.name).read_bytes())
        return f"{file.name} of {source.name}"
    if how < 0.16 or not file.is_file():
        return _bytes(file, rng)
    try:
        held = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return "left as it is"
    if not isinstance(held, dict) or not held:
        return "left as it is"
    if how < 0.22:
        return _in_processor_file(folder, held, rng)
    place, key = rng.choice(list(_places(held)))
    if how < 0.32 and isinstance(place, dict):
        key = rng.choice(KEYS)
    if how < 0.45:
        was = place.pop(key, None) if isinstance(place, dict) else place.pop(key)
        what = f"{key} ({json.dumps(was)[:40]}) gone"
    else:
        value = copy.deepcopy(rng.choice(VALUES)) if rng.random() < 0.7 else _near(place, key, rng)
        place[key] = value
        what = f"{key} = {json.dumps(value)[:60]}"
    file.write_text(json.dumps(held))
    return f"{file.name}: {what}"


def _bytes(file: Path, rng: random.Random) -> str:
    """Other bytes: a file that ends early, one changed byte, something else altogether, or nothing."""
    was = file.read_bytes() if file.is_file() else b""
    how = rng.randrange(4)
    if how == 0 or not was:
        made = rng.choice(BYTES)
    elif how == 1:
        made = was[: rng.randrange(len(was))]
    elif how == 2:
        at = rng.randrange(len(was))
        made = was[:at] + bytes([rng.randrange(256)]) + was[at + 1 :]
    else:
        file.unlink()
        return f"{file.name}: gone"
    file.write_bytes(made)
    return f"{file.name}: {len(made)} bytes {made[:30]!r}"


def _in_processor_file(folder: Path, held: dict[str, Any], rng: random.Random) -> str:
    """The newer file, which counts first, has the settings, changed or of another shape."""
    inner: Any = copy.deepcopy(held)
    if rng.random() < 0.5:
        inner[rng.choice(sorted(inner))] = copy.deepcopy(rng.choice(VALUES))
    else:
        inner = copy.deepcopy(rng.choice(VALUES))
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    return f"processor_config.json: {json.dumps(inner)[:60]}"


def _near(place: Any, key: Any, rng: random.Random) -> Any:
    """A value like the one that is there."""
    was = place[key] if not isinstance(place, dict) or key in place else 1
    if isinstance(was, bool):
        return not was
    if isinstance(was, int | float):
        return rng.choice((was + 1, was - 1, was * 2, -was, was / 2, float(was), str(was), [was], was * 1000))
    if isinstance(was, str):
        return rng.choice((was + "x", was[:-1], was.upper(), [was]))
    if isinstance(was, list):
        return rng.choice((was[:-1], was + was, was[::-1], {"0": was}))
    return rng.choice(([was], str(was), {}))


def _places(held: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        yield held, key
        if isinstance(value, dict | list):
            yield from _places(value)
