"""``check-model`` passes what is right and names what is wrong; the example package passes by entry point."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import VOCAB, write_tokenizer
from tests.families.test_same_tokens import CARDS, VARIANTS, pairs, prompts
from tests.families.text_checkpoints import CASES, set_keys
from tests.oracles.transformers_model import assert_same
from trencadis.backends.conformance.check_model.transformers_oracle import TransformersOracle, write_dummy
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.family import ParsedConfig
from trencadis.core.models.linear_and_embedding import scaled
from trencadis.server.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "model_granite"
SOURCE = (EXAMPLE / "model_granite.py").read_text(encoding="utf-8")
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "logits_scaling": 8.0, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_local_experts": 40,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e7, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49159,
}  # fmt: skip
"""What config.json of a published model says, in part."""


def installed(folder: Path, source: str) -> Path:
    """As after ``pip install ./examples/model_granite``: the module, and its entry points in a dist-info folder."""
    info = folder / "trencadis_model_granite-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trencadis-model-granite\nVersion: 0.1.0\n")
    points = (EXAMPLE / "pyproject.toml").read_text().partition('"trencadis.models"]\n')[2].partition("\n\n")[0]
    (info / "entry_points.txt").write_text("[trencadis.models]\n" + points.replace('"', "") + "\n")
    (folder / "model_granite.py").write_text(source)
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``package(source)``: installs it in this process."""

    def install(source: str) -> None:
        monkeypatch.syspath_prepend(str(installed(tmp_path, source)))
        forget()

    yield install
    sys.modules.pop("model_granite", None)
    forget()


def forget() -> None:
    model_registry.installed_families.cache_clear()
    model_registry.family_of.cache_clear()


@pytest.fixture
def granite(tmp_path: Path) -> Path:
    """A folder with config.json alone."""
    folder = tmp_path / "granite"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GRANITE))
    return folder


def checked(capsys: Any, path: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, results by name)."""
    capsys.readouterr()
    code = main(["check-model", str(path), "--json", *words])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["passed"] else 1)
    return code, {one["name"]: one for one in report["results"]}


def test_the_example_passes_by_entry_point(package: Any, granite: Path, capsys: Any) -> None:
    package(SOURCE)
    assert main(["check-model", str(granite), "--dummy"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:-1]] == ["pass"] * 12, said
    assert said[-1].startswith("granite: 12 passed, 0 failed, 0 skipped")


MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "a multiplier dropped": (
        'residual_scale=multiplier(c, "residual_multiplier"),', "", "sum behind attention of layer 0: off by",
        "does not read residual_multiplier, which transformers has",
    ),
    "a multiplier read and not used": (
        'embedding_scale=multiplier(c, "embedding_multiplier")',
        'embedding_scale=multiplier(c, "embedding_multiplier") ** 0', "embeddings: off by",
        "ours is 0.08333 times theirs",
    ),
    "wrong scale of scores": (
        'rotary * multiplier(c, "attention_multiplier")', 'multiplier(c, "attention_multiplier") ** 0.5',
        "attention of layer 0: off by", "",
    ),
    "wrong scale of logits": ("1 / multiplier", "multiplier", "logits: off by", "ours is 64 times theirs"),
    "wrong activation": ("text,\n            experts", 'text,\n            activation="gelu",\n            experts',
        "MLP of layer 0: off by", "",
    ),
}  # fmt: skip
"""(what is right, what stands in its place, the part that is named, what else is said)."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(package: Any, granite: Path, capsys: Any, mistake: str) -> None:
    right, wrong, part, more = MISTAKES[mistake]
    assert SOURCE.count(right) == 1
    package(SOURCE.replace(right, wrong))
    code, results = checked(capsys, granite, "--dummy", "--only", "config,parts,logits.whole")
    reasons = " | ".join(one["reason"] for one in results.values())
    assert code == 1 and part in results["parts"]["reason"] and more in reasons, reasons
    assert results["logits.whole"]["status"] == "fail"
    assert (results["config"]["status"] == "fail") == ("does not read" in more)


def test_the_example_is_small() -> None:
    lines = [line for line in SOURCE.splitlines() if line.strip()]
    assert len(lines) + len((EXAMPLE / "pyproject.toml").read_text().splitlines()) < 80 and ast.parse(SOURCE)


def test_a_built_in_family_passes_on_its_checkpoint(form: Any, capsys: Any) -> None:
    """A share: norms behind the sums, which have parts of their own, and names that transformers' parts lack."""
    code, results = checked(capsys, form("opt", "350m"), "--only", "config,weights,ledger,parts,logits.whole,ranks")
    assert code == 0, results


def test_weights_that_are_missing_or_left_over_are_named(form: Any, capsys: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(form("qwen3", "plain"), tmp_path / "qwen3"))
    set_keys(folder, attention_bias=True)
    code, results = checked(capsys, folder, "--only", "weights,logits.whole")
    assert code == 1 and "lacks the weight layers.0.self_attn.q_proj.bias" in results["weights"]["reason"]
    assert results["logits.whole"]["status"] == "skip", "one reason fails one check"
    family = model_registry.family_of("Qwen3ForCausalLM")
    set_keys(folder, attention_bias=False)

    def without(root: Any, c: Any, tied: bool) -> ParsedConfig:
        made = family.config(root, c, tied)
        return replace(made, text=replace(made.text, qk_norm=False))

    with pytest.MonkeyPatch.context() as patch:
        for place in ("checkpoint.config_reader", "models.decoder"):
            patch.setattr(f"trencadis.core.{place}.family_of", lambda name: replace(family, config=without))
        code, results = checked(capsys, folder, "--only", "weights")
    assert code == 1
    said = results["weights"]["reason"]
    assert "4 stored weights that transformers uses are not: model.layers.0.self_attn.k_norm.weight" in said


def test_a_default_that_differs_from_transformers_is_named(package: Any, granite: Path, capsys: Any) -> None:
    set_keys(granite, logits_scaling=1.0)
    held = json.loads((granite / "config.json").read_text())
    del held["max_position_embeddings"]
    (granite / "config.json").write_text(json.dumps(held))
    package(SOURCE.replace("positions=2048", "positions=4096"))
    code, results = checked(capsys, granite, "--dummy", "--only", "config")
    assert code == 1 and "max_positions is 4096, there 2048" in results["config"]["reason"]


def test_a_refused_config_fails(package: Any, granite: Path, capsys: Any) -> None:
    set_keys(granite, hidden_act="mish")
    package(SOURCE)
    assert main(["check-model", str(granite), "--dummy"]) == 2
    said = capsys.readouterr().err
    assert f"{granite / 'config.json'}: hidden_act" in said and said.count("\n") == 1
    (granite / "model.safetensors").touch()
    code, results = checked(capsys, granite, "--only", "parts,ranks")
    assert code == 1 and f"{granite / 'config.json'}: hidden_act" in results["parts"]["reason"]
    assert results["ranks"]["status"] == "skip"
    assert results["ranks"]["reason"] == "config.json is not accepted, as said above"


def test_a_norm_behind_attention_alone_does_not_read_the_sum(tmp_path: Path) -> None:
    olmo = {key: GRANITE[key] for key in ("hidden_act", "vocab_size", "hidden_size", "intermediate_size")}
    olmo |= {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(olmo))
    write_dummy(tmp_path, tmp_path / "dummy", 0)
    seen = TransformersOracle(tmp_path / "dummy").parts([1, 2, 3], 2)
    assert "attention of layer 1" in seen and not [name for name in seen if name.startswith("sum behind attention")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a folder with config.json; none is none"),
        (["/nowhere"], "needs a folder with config.json"),
        (["FOLDER"], "holds no safetensors weights; --dummy makes"),
        (["FOLDER", "--dummy", "--only", "speed"], "--only speed: no check has a name"),
        (["FOLDER", "--seed", "-1"], "--seed -1: it must be a whole number"),
        (["FOLDER", "--fast"], "check-model does not know --fast"),
    ],
)
def test_bad_words_are_one_line(granite: Path, capsys: Any, words: list[str], said: str) -> None:
    assert main(["check-model", *(str(granite) if w == "FOLDER" else w for w in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_multiplier_of_1_is_no_operation() -> None:
    x = torch.ones(2)
    assert scaled(x, 1.0) is x and scaled(x, 0.5).tolist() == [0.5, 0.5]


@pytest.mark.long
@pytest.mark.parametrize("variant", [*CARDS, "compiled hpu", "two ranks"])
def test_the_example_has_transformers_tokens_on_cards(
    package: Any, granite: Path, greedy: Any, tmp_path: Path, monkeypatch: Any, variant: str
) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if variant == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    if variant == "two ranks":
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    package(SOURCE)
    set_keys(granite, vocab_size=VOCAB)
    write_dummy(granite, tmp_path / "made", 0)
    write_tokenizer(tmp_path / "made")
    assert_same(pairs(greedy, tmp_path / "made", prompts(3, 60), 4, **VARIANTS[variant]))


@pytest.mark.long
def test_every_form_of_every_family_passes(form: Any, capsys: Any) -> None:
    for family, name in CASES:
        code, results = checked(capsys, form(family, name))
        failed = {n: one["reason"] for n, one in results.items() if one["status"] != "pass"}
        print(f"\n{family}, {name}: {failed or 'all pass'}")
        assert code == 0, failed


@pytest.mark.long
def test_the_example_passes_in_a_process_of_its_own(granite: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    paths = os.pathsep.join(map(str, (ROOT, installed(site, SOURCE))))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trencadis.server.cli.main", "check-model", str(granite), "--dummy"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
