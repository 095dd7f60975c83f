"""What stands beside the families names none of them: a family is its own package and a line of the registry."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from trencadis.core.checkpoint.model_registry import TABLE, family_of

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED = ("core", "server", "backends", "multimodal")
FAMILIES = (
    "core/family_configs/", "multimodal/qwen2_vl/", "multimodal/qwen2_5_vl/", "multimodal/qwen3_vl/",
    "multimodal/llava/",
    "multimodal/llava_next/", "multimodal/gemma3/", "multimodal/internvl/", "multimodal/idefics3/",
    "multimodal/mllama/", "multimodal/pixtral/", "multimodal/phi3_v/", "multimodal/glm4v/", "multimodal/gemma4/",
    "multimodal/lfm2_vl/", "multimodal/minicpmv4_6/",
)  # fmt: skip
LONGER = (
    "core/family_configs/", "multimodal/qwen2_vl/", "multimodal/qwen3_vl/", "multimodal/mllama/", "multimodal/pixtral/",
    "multimodal/glm4v/", "multimodal/gemma4/", "multimodal/lfm2_vl/", "multimodal/minicpmv4_6/",
)  # fmt: skip
"""Decoders without images; a family with videos, which others build on; and seven with towers of their own."""
LINES = 280
"""Of a family's package, processor and configuration included."""
NAMES = re.compile(
    r"1_?176\b|image_pad\b|video_pad\b|qwen[23](_5|\.5)?[_-]?vl|llava|clipvision|internvl|idefics|smolvlm|pixtral|mistral3"
    r"|phi-?3(\.5)?[_-]?v|mllama|glm-?4(\.\d)?v|lfm2_?vl|minicpm",
    re.IGNORECASE,
)
TABLE_LINE = re.compile(r'^    "\w+": "trencadis\.multimodal\.\w+\.(?:\w+_)?family:[A-Z0-9_]+",$|^OTHER_LAYOUTS = ')


def shared_lines() -> list[tuple[str, str]]:
    """(place, line) of all modules beside the families, without the registry's table."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *SHARED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = []
    for name in listed.stdout.split():
        if (
            not name.endswith(".py")
            or name.startswith((*FAMILIES, "server/text/chat_template.py"))
            or not (ROOT / name).is_file()
        ):
            continue
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            if not (name == "core/checkpoint/model_registry.py" and TABLE_LINE.match(line)):
                found.append((f"{name}:{number}", line))
    return found


def test_no_family_is_named_beside_the_families() -> None:
    lines = shared_lines()
    assert len(lines) > 30_000
    assert [f"{place} {line.strip()}" for place, line in lines if NAMES.search(line)] == []


@pytest.mark.parametrize("folder", [name for name in FAMILIES if name not in LONGER])
def test_a_family_is_short(folder: str) -> None:
    files = list((ROOT / folder).glob("*.py"))
    count = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert files and count <= LINES, f"{folder}: {count} lines; what others could use stands beside the families"


@pytest.mark.parametrize("line", [
    "VALUES = 1176", "VALUES = 1_176", '"<|image_pad|>"', "from trencadis.multimodal.qwen2_5_vl import x", "Qwen2.5-VL",
])  # fmt: skip
def test_such_a_line_would_be_found(line: str) -> None:
    assert NAMES.search(line)


def test_every_family_that_sees_names_functions_that_exist() -> None:
    from trencadis.core.checkpoint.model_registry import import_object

    seen = [found for name in TABLE if (found := family_of(name)).vision is not None]
    assert len(seen) >= 2
    for family in seen:
        assert family.vision is not None
        v = family.vision
        assert all(
            callable(import_object(name)) for name in (v.needs, v.sizes, v.processor, v.expand, v.positions) if name
        )
