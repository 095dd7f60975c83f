"""Families are found by architecture, built in or offered by a package; what they must not do is said in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.pages import reference_pages
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, DeviceShare
from trencadis.core.errors import StartupError
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.shapes.launch_costs import costs_of
from trencadis.server.cli import main

ROOT = Path(__file__).resolve().parents[2]
GRANITE = """
from dataclasses import replace
from trencadis.core.family_configs.llama import FAMILY as LLAMA
FAMILY = replace(LLAMA, name="Other", model_type="other", architectures={"OtherForCausalLM": "generate"})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """``package(architecture, source)``: installs a package that offers it."""

    def install(architecture: str, source: str) -> None:
        info = tmp_path / "model_other-0.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: model-other\nVersion: 0.3\n")
        (info / "entry_points.txt").write_text(f"[trencadis.models]\n{architecture} = model_other:FAMILY\n")
        (tmp_path / "model_other.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    yield install
    sys.modules.pop("model_other", None)
    forget()


def forget() -> None:
    model_registry.installed_families.cache_clear()
    model_registry.family_of.cache_clear()


def test_every_built_in_record_serves_what_the_table_says() -> None:
    for name in model_registry.TABLE:
        family = model_registry.family_of(name)
        assert family.architectures[name] in (GENERATE, CLASSIFY, BARE)
        listed = {n for n, target in model_registry.TABLE.items() if model_registry.family_of(n) is family}
        assert listed == set(family.architectures), family.name


def test_only_the_family_in_use_is_imported_and_none_needs_torch() -> None:
    code = (
        "import sys; from trencadis.core.checkpoint import model_registry; model_registry.family_of('OPTForCausalLM');"
        "names = [n for n in sys.modules if n.startswith('trencadis.core.family_configs.')];"
        "assert names == ['trencadis.core.family_configs.opt'], names; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


LONG = {"gemma4.py": 200, "nemotron_h.py": 180, "qwen3_5.py": 160, "llama.py": 140, "bert.py": 130}
"""Families whose checkpoints have several forms, or several that are alike -> most lines."""


def test_a_family_is_at_most_120_lines() -> None:
    for file in [*(ROOT / "core" / "family_configs").glob("*.py"), ROOT / "multimodal" / "qwen2_5_vl" / "family.py"]:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= LONG.get(file.name, 120), file.name


NAMED = re.compile(r"qwen|llama|mistral|\bgpt.?2|\bopt.(?:125|350)|\bOPTFor|\bgemma|\bphi\b", re.IGNORECASE)
REMAINS = {
    "server/text/chat_template.py": "file names of templates, theirs and ours",
    "core/checkpoint/rope_config.py": "llama3 is the name of a rotary type in every config.json",
    "core/models/rotary_embedding.py": "the same type, and whose report has its formula",
    "core/checkpoint/config_reader.py": "a key that says whose pooling head it was; it changes nothing",
    "core/engine_config.py": "what --load-format takes elsewhere",
    "core/envs.py": "what Intel's guide says about a variable",
    "backends/hpu/start/gaudi_mode_and_env.py": "the same",
    "server/tools": "vLLM's names of the forms in which calls are written; a checkpoint of any family may use each",
    "server/tools/reasoning_parser.py": "the same, of thoughts",
    "server/config/server_config.py": "the same, in the help of their flags",
    "server/text/checkpoint_tokenizer.py": "whose tokenizers are of a kind",
    "server/config/model_download.py": "an example of an id without an owner",
    "server/grammars/gbnf.py": "llama.cpp, whose grammars these are",
    "server/routes/openapi.py": "qwen-vl-utils, a client's library",
    "server/prompts/prompt_and_chat_messages.py": "the same",
}
"""Where a family's name stands outside its record, and why it says nothing about a family's model."""


def test_no_family_is_named_outside_its_record() -> None:
    found: dict[str, list[str]] = {}
    for room in ("core", "server", "backends"):
        for file in sorted((ROOT / room).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if name.startswith("core/family_configs/") or name == "core/checkpoint/model_registry.py":
                continue
            words = NAMED.findall(file.read_text(encoding="utf-8"))
            if words and name not in REMAINS and str(Path(name).parent) not in REMAINS:
                found[name] = words
    assert not found


def test_a_package_offers_a_family(package: Any, form: Any, capsys: Any, tmp_path: Path) -> None:
    package("OtherForCausalLM", GRANITE)
    assert model_registry.architectures()[-1] == "OtherForCausalLM"
    assert model_registry.family_of("OtherForCausalLM").name == "Other"
    assert main.main(["models"]) == 0
    said = capsys.readouterr().out
    assert "Other (model-other 0.3, model_other:FAMILY)\n  OtherForCausalLM" in said
    assert "OPT (built in, trencadis.core.family_configs.opt)" in said


@pytest.mark.parametrize(
    ("architecture", "source", "said"),
    [
        ("OPTForCausalLM", GRANITE, r"model-other 0.3 claims OPTForCausalLM, which is .*opt:FAMILY's; uninstall one"),
        ("OtherForCausalLM", "import no_such_module", "model-other 0.3 offers OtherForCausalLM and fails: ModuleNotF"),
        ("AnotherModel", GRANITE, "model-other 0.3: model_other:FAMILY is no family with AnotherModel"),
    ],
)
def test_a_package_at_fault_is_named_in_one_line(package: Any, architecture: str, source: str, said: str) -> None:
    package(architecture, source)
    with pytest.raises(StartupError, match=said) as caught:
        model_registry.architectures()
        model_registry.family_of(architecture)
    assert "\n" not in str(caught.value)


def test_a_family_may_count_its_own_weights_and_costs(form: Any, monkeypatch: Any) -> None:
    config = load_config(form("opt", "125m"))
    own = replace(
        model_registry.family_of(config.architecture),
        weights=lambda model, held: 1000 * held.itemsize * held.ranks,
        values=lambda model: 7,
    )
    assert costs_of(config, 16, 100.0).head != 64 * config.text.vocab / 7
    for place in ("trencadis.core.memory.memory_estimator", "trencadis.core.shapes.launch_costs"):
        monkeypatch.setattr(f"{place}.family_of", lambda architecture: own)
    assert MemoryEstimator(config, itemsize=4, ranks=2).weights() == 8000 == own.weights(config, DeviceShare(4, 2))  # type: ignore[misc]
    assert costs_of(config, 16, 100.0).head == 64 * config.text.vocab / 7


def test_the_page_lists_what_the_registry_has() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == reference_pages.make_models_page(page), "tools/gen_flags.py"
