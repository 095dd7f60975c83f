"""Where drafts begin and end: rows of a step, the way a model drafts, memory on paper, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import checkpoints
from tests.speculation.test_cpu_answers import engine_of
from tests.speculation.test_eagle3 import ALONE, counting_model, head_at, weights_of
from trencadis.core.errors import StartupError
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.sequence import Sequence as Seq
from trencadis.core.spec.draft_count import TRIAL, DraftModes
from trencadis.core.spec.spec_config import DEFAULT_DRAFTS
from trencadis.server.plan import plan_command

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def counting(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues every id by the next one."""
    folder = tmp_path_factory.mktemp("counting") / "model"
    return counting_model(checkpoint("qwen2", tie_word_embeddings=False), folder)[0]


def drafted_at(
    path: Path, requests: int, monkeypatch: pytest.MonkeyPatch, predicted: Sequence[int] = (), **flags: Any
) -> dict[int, int]:
    """Running sequences -> the most drafts of one of them in a step.

    Prompts hold the answers, so that every token has n-grams to follow. Each request ends some tokens later than the
    one before.
    """
    engine = engine_of(path, **{**ALONE, "max_num_seqs": requests, **flags})
    found: dict[int, int] = {}
    prepare = DraftScheduler.prepare

    def noted(self: DraftScheduler, running: list[Seq], *args: Any) -> None:
        prepare(self, running, *args)
        count = max((len(seq.proposal) for seq in running), default=0)
        found[len(running)] = max(found.get(len(running), 0), count)

    monkeypatch.setattr(DraftScheduler, "prepare", noted)
    for number in range(requests):
        params = SamplingParams(temperature=0.0, max_tokens=20 + 12 * number, ignore_eos=True)
        prompt = [*range(10, 110), 10]
        engine.add(Request(f"r{number}", prompt, params, prediction=list(predicted)))
    while not engine.idle():
        engine.step()
    assert engine.scheduler.totals.spec_accepted == engine.scheduler.totals.spec_draft_tokens
    engine.close()
    monkeypatch.undo()
    found.pop(0, None)
    return found


def test_ngrams_are_drafted_by_default_for_up_to_four_sequences(
    counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafted_at(counting, 6, monkeypatch, spec_always=True)
    assert found == {6: 0, 5: 0, **dict.fromkeys((4, 3, 2, 1), DEFAULT_DRAFTS)}


def test_nothing_is_drafted_with_no_speculation(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drafted_at(counting, 2, monkeypatch, speculation=False)
    assert not any(found.values())


def test_disable_by_batch_size_is_the_first_number_of_sequences_without_drafts(
    counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 2, "disable_by_batch_size": 3}
    found = drafted_at(counting, 4, monkeypatch, speculative_config=asked, spec_always=True)
    assert found == {4: 0, 3: 0, 2: 2, 1: 2}
    single: dict[str, Any] = {"spec_disable_by_batch_size": 3, "spec_tokens": 2, "spec_always": True}
    assert drafted_at(counting, 4, monkeypatch, **single) == found


def test_a_prediction_is_drafted_beside_any_number_of_sequences(
    counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafted_at(counting, 6, monkeypatch, range(11, 90), spec_always=True)
    assert set(found.values()) == {DEFAULT_DRAFTS}


@pytest.mark.parametrize(("drawn", "best"), [(0.9, 0.3), (0.3, 0.9)])
def test_a_model_drafts_in_the_way_that_is_accepted_more_often(drawn: float, best: float) -> None:
    """The other way is tried now and then, so that a change of the text is noticed."""
    rng, modes = random.Random(0), DraftModes()

    def count_drawn(rates: tuple[float, float], count: int) -> int:
        found = 0
        for _ in range(count):
            way = modes.choose()
            found += way
            modes.learn(4, sum(rng.random() < rates[way] for _ in range(4)))
        return found

    count_drawn((best, drawn), 40)
    after = count_drawn((best, drawn), 120)
    tried = 120 // TRIAL
    assert after == 120 - tried if drawn > best else after == tried
    count_drawn((drawn, best), 1200)
    after = count_drawn((drawn, best), 120)
    assert after == tried if drawn > best else after == 120 - tried


@pytest.mark.parametrize("flags", [{"spec_method": "ngram"}, {"speculative_config": {"method": "suffix"}}])
def test_a_pooling_engine_drafts_nothing(flags: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoints.bare(tmp_path / "bare")
    asked = {**ALONE, "max_num_batched_tokens": 384, "batch_invariant": False, "runner": "pooling"}
    with pytest.raises(StartupError, match="a pooling engine generates nothing to draft; leave it out") as error:
        engine_of(path, **asked, **flags)
    assert "\n" not in str(error.value) and str(error.value).startswith(("--spec-method", "--speculative-config"))
    engine = engine_of(path, **asked)
    assert engine.scheduler.drafting is None
    engine.close()


FEW = ("--dtype", "float32", "--max-model-len", "96", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")
DRAFTING = ("draft_model", "eagle3")


def large_draft(folder: Path, kind: str, target: Path) -> Path:
    """The folder of a draft model of 1.4 GiB or a head of 0.7 GiB, of which there is only a configuration."""
    if kind == "eagle3":
        return head_at(folder, {"norm.weight": torch.ones(1)}, intermediate_size=1_000_000)
    config = json.loads((target / "config.json").read_text())
    config.pop("layer_types", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 24, "intermediate_size": 80_000}))
    return folder


@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("device", ["cuda", "hpu", "cpu"])
def test_a_draft_that_does_not_fit_is_named_with_what_is_missing(
    device: str, kind: str, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model alone fits, and so does the draft where its memory is there."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    target = checkpoint("qwen2")
    large = large_draft(tmp_path / "large", kind, target)
    size = "500MiB" if device == "cpu" else "1GiB"
    words = [str(target), "--device", device, *FEW]
    drafting = ["--spec-method", kind, "--spec-model", str(large)]
    assert plan_command.main([*words, "--memory", size]) == 0
    with pytest.raises(StartupError) as error:
        plan_command.main([*words, "--memory", size, *drafting])
    line, name = str(error.value), "head" if kind == "eagle3" else "draft model"
    assert f"the {name} large does not fit" in line and "are missing" in line and "\n" not in line
    assert device == "cpu" or (line.startswith("--spec-method: ") and line.endswith("a smaller one would be needed."))
    assert "tensor-parallel" not in line, "a draft model runs beside one rank"
    assert plan_command.main([*words, "--memory", "8GiB", *drafting]) == 0


@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("device", ["cuda", "hpu", "cpu"])
def test_the_plan_has_the_weights_and_keys_of_what_drafts(
    device: str, kind: str, checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    target = checkpoint("qwen2")
    draft = target if kind == "draft_model" else head_at(tmp_path / "head", weights_of(1))
    words = [str(target), "--device", device, "--memory", "4GiB", *FEW, "--json"]

    def rows_of(*more: str) -> dict[str, int]:
        assert plan_command.main([*words, *more]) == 0
        return {row["name"]: row["bytes"] for row in json.loads(capsys.readouterr().out)["ledger"]}

    plain, drafted = rows_of(), rows_of("--spec-method", kind, "--spec-model", str(draft))
    assert not plain.get("draft weights") and not plain.get("draft KV")
    assert drafted["weights"] == plain["weights"] and drafted["draft KV"] > 0
    if kind == "draft_model":
        assert drafted["draft weights"] == drafted["weights"]
    else:
        assert 0 < drafted["draft weights"] < drafted["weights"]
    assert sum(drafted.values()) == sum(plain.values()) == 4 << 30
