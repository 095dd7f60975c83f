"""A plug-in that uses a name of before is told its successor in one line, and every successor exists."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

from trencadis.core import devices
from trencadis.core.checkpoint import model_registry
from trencadis.core.errors import StartupError
from trencadis.core.renamed_plugin_api_error_hints import find_successors, read_renamed_names
from trencadis.server.tools import parser_registry

PLUGIN = "plugin_of_before"
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Makes a module of another package; returns the first part of its entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_module(source: str) -> str:
        sys.modules.pop(PLUGIN, None)
        (tmp_path / f"{PLUGIN}.py").write_text(source)
        return f"{PLUGIN}:"

    yield write_module
    sys.modules.pop(PLUGIN, None)


def one_line(refused: pytest.ExceptionInfo[StartupError]) -> str:
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_every_module_has_moved_to_one_that_exists() -> None:
    for old, new in read_renamed_names().modules.items():
        assert new != old and find_spec(f"trencadis.{new}") is not None, old
        if old != "multimodal.vit":  # a package has the name of a module of before
            folder = Path(__file__).parents[2].joinpath(*old.split("."))
            assert not folder.with_suffix(".py").exists() and not list(folder.glob("*.py")), old


def test_every_name_and_member_has_a_successor_in_the_source() -> None:
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("core", "server", "multimodal", "backends")]
    text = "\n".join(f.read_text(encoding="utf-8") for folder in folders for f in folder.rglob("*.py"))
    defined = set(re.findall(r"(?:def|class) (\w+)|^(\w+)(?:: [^=\n]+)? = |(\w+): |\.(\w+)\b|, (\w+) = ", text, re.M))
    words = {word for found in defined for word in found}
    _, moved, names, members = read_renamed_names()
    new = {*names.values(), *members, *(name for inside in members.values() for name in inside.values())}
    assert new - words == set()
    assert all(hasattr(import_module(f"trencadis.{new}"), old.rpartition(".")[2]) for old, new in moved.items())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "from trencadis.core.layout import WINDOW_SLOTS",
            "trencadis.core.layout.WINDOW_SLOTS is called trencadis.core.vision_config.WINDOW_SLOTS now",
        ),
        (
            "from trencadis.multimodal.tiles.model import (\n    TileModel,\n)",
            "trencadis.multimodal.tiles.model is called trencadis.multimodal.vit.tile_vision_model now; "
            "TileModel is called TileVisionModel now",
        ),
        (
            "from trencadis.core.buckets import Plan, Stage",
            "trencadis.core.buckets.Plan is called trencadis.core.bucket_lookup.Plan now",
        ),
        (
            "from trencadis.core.step import Step, StepInputs",
            "trencadis.core.step.StepInputs is called trencadis.core.launch_inputs.StepInputs now",
        ),
        (
            "from trencadis.core import step\nstep.HeadOutput",
            "trencadis.core.step.HeadOutput is called trencadis.core.step_output.HeadOutput now",
        ),
        (
            "from trencadis.core.families.opt import describe",
            "trencadis.core.families.opt is called trencadis.core.family_configs.opt now",
        ),
        (
            "from trencadis.core.models.attention import HeadSpan",
            "trencadis.core.models.attention.HeadSpan is called trencadis.core.models.rotary_embedding.HeadSpan now",
        ),
        ("from trencadis.multimodal.processor_interface import Prepared", "Prepared is called PreparedImage now"),
        (
            "from trencadis.core.checkpoint.model_config import TextConfig\nTextConfig(joined=True)",
            "TextConfig(joined=) is called bidirectional_images now",
        ),
        (
            "import trencadis.core.models as models\nmodels.loader.open_weights",
            "trencadis.core.models.loader is called trencadis.core.checkpoint.weight_file_reader now",
        ),
    ],
)
def test_imports_fields_and_attributes_of_before(source: str, said: str, write: Write) -> None:
    write(source)
    with pytest.raises((ImportError, AttributeError, TypeError)) as failed:
        import_module(PLUGIN)
    assert find_successors(failed.value) == f"; {said}"


def test_other_errors_of_plug_ins_have_no_successor(write: Write) -> None:
    for source in ("import no_such_package", "from trencadis.core import nothing", "None.x", "dict(1)", "1 / 0"):
        write(source)
        with pytest.raises(Exception) as failed:
            import_module(PLUGIN)
        assert find_successors(failed.value) == ""


def test_each_kind_of_plug_in_is_told(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    where = write("from trencadis.multimodal.rgb_images import to_rgb")
    said = "trencadis.multimodal.rgb_images is called trencadis.multimodal.convert_to_rgb now"

    def offered(group: str) -> list[EntryPoint]:
        return [EntryPoint("other", f"{where}X", group)]

    for module in (devices, parser_registry, model_registry):
        monkeypatch.setattr(module, "entry_points", offered)
    model_registry.installed_families.cache_clear()
    model_registry.family_of.cache_clear()
    asked = (
        lambda: devices.policy_of("other"),
        lambda: parser_registry.find_reasoning_format("other", None),
        lambda: parser_registry.find_tool_parser("other", None),
        lambda: model_registry.family_of("other"),
    )
    try:
        for ask in asked:
            sys.modules.pop(PLUGIN, None)
            with pytest.raises(StartupError) as refused:
                ask()
            assert said in one_line(refused)
    finally:
        model_registry.installed_families.cache_clear()
        model_registry.family_of.cache_clear()


def test_a_parser_with_methods_of_before_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from trencadis.server.tools.tool_parser import ToolParser\n"
    where = write(source + "class Old(ToolParser):\n    def grammar(self): ...\n    def call(self): ...\n")
    point = EntryPoint("old", f"{where}Old", parser_registry.TOOL_GROUP)
    monkeypatch.setattr(parser_registry, "entry_points", lambda group: [point])
    with pytest.raises(StartupError) as refused:
        parser_registry.find_tool_parser("old", None)
    line = one_line(refused)
    assert "Old.grammar is called parse now" in line and "Old.call is called call_rule now" in line
