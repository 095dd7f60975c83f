"""How layers are divided among pipeline stages, and what each of them reads of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trencadis.assets import demo_path
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig, StageShare
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError
from trencadis.core.models import model_loader
from trencadis.core.shapes.pipeline_partition import divide_layers, split_model


def search_best_division(layers: list[int], first: int, last: int, stages: int) -> int:
    """The least sum of squares over all divisions."""
    found = []
    for cuts in itertools.combinations(range(1, len(layers)), stages - 1):
        edges = (0, *cuts, len(layers))
        costs = [sum(layers[a:b]) for a, b in itertools.pairwise(edges)]
        costs[0] += first
        costs[-1] += last
        found.append(sum(c * c for c in costs))
    return min(found)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_division_is_more_even(stages: int) -> None:
    rng = torch.Generator().manual_seed(stages)
    for _ in range(20):
        layers = torch.randint(1, 30, (8,), generator=rng).tolist()
        first, last = torch.randint(0, 60, (2,), generator=rng).tolist()
        counts = divide_layers(layers, first, last, stages)
        assert sum(counts) == 8 and min(counts) >= 1
        edges = [0, *itertools.accumulate(counts)]
        costs = [sum(layers[a:b]) for a, b in itertools.pairwise(edges)]
        costs[0] += first
        costs[-1] += last
        assert sum(c * c for c in costs) == search_best_division(layers, first, last, stages)


def test_the_tower_and_the_head_take_layers_from_their_stages() -> None:
    assert divide_layers([10] * 28, 0, 0, 4) == (7, 7, 7, 7)
    tower, *_, head = divide_layers([10] * 28, 30, 20, 4)
    assert tower < 7 and head < 8 and tower + head < 14


@pytest.mark.parametrize(
    ("stages", "partition", "says"),
    [
        (5, "", "--pipeline-parallel-size 5 is more than the 4 layers of demo; at most 4 fit"),
        (2, "1,2", "VLLM_PP_LAYER_PARTITION=1,2 puts 3 layers on 2 stages; the model has 4 layers"),
        (2, "1,1,2", "VLLM_PP_LAYER_PARTITION=1,1,2 puts 4 layers on 3 stages; .* 2,2 would fit"),
        (2, "0,4", "is no list of layers a stage, each above 0; 2,2 would fit"),
        (2, "2;2", "is no list of layers a stage"),
        (2, "-1,5", "is no list of layers a stage"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(stages: int, partition: str, says: str) -> None:
    with pytest.raises(StartupError, match=says) as refused:
        split_model(load_config(demo_path()), stages, partition)
    assert "\n" not in str(refused.value)


def test_a_partition_that_is_named_is_taken() -> None:
    made = split_model(load_config(demo_path()), 3, "2, 1,1")
    assert [(m.share.first, m.share.stop) for m in made] == [(0, 2), (2, 3), (3, 4)]


def test_a_family_with_layers_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trencadis.core.shapes.pipeline_partition.family_of", lambda a: SimpleNamespace(values=len, weights=None)
    )
    with pytest.raises(StartupError, match="has layers of its own, which are not divided"):
        split_model(load_config(demo_path()), 2)


class Noted:
    """A checkpoint's tensors, of which those are noted whose values are read."""

    def __init__(self, model: ModelConfig) -> None:
        self.tensors = dict(open_weights(model.path))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())


def test_each_stage_reads_its_own_tensors_and_together_they_read_all() -> None:
    """The others may even be missing or broken."""
    model = load_config(demo_path())
    backend = make_backend(BackendConfig())
    whole = model_loader.make_model(model, backend)
    whole.load(Noted(model))
    names = model_registry.family_of(model.architecture).names
    every, total = set[str](), 0
    for part in split_model(model, 2):
        noted, taken = Noted(model), set[str]()
        source = CheckpointSource(noted, names, backend, part)
        find = source._find

        def seen(name: str, shape: tuple[int, ...], find: Any = find, taken: set[str] = taken) -> Any:
            taken.add(name)
            return find(name, shape)

        source._find = seen  # type: ignore[method-assign]
        made: Any = model_loader.make_model(part, backend)
        made.load_from(source)
        layers = {int(n.split(".")[1]) for n in taken if n.startswith("layers.")}
        assert layers == set(part.share.layers) and set(source.tensors) == taken
        assert any(n.startswith("visual.") for n in taken) == part.share.starts
        every |= taken
        total += made.nbytes()
    assert set(CheckpointSource(Noted(model), names, backend, model).tensors) == every
    assert total == whole.nbytes() and model.text.tied  # a tied table counts twice in one model, too


def test_a_share_knows_its_weights() -> None:
    middle = StageShare(2, 4, 1, 3)
    names = ["layers.1.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"]
    assert [middle.holds(n) for n in names] == [False, True, False, False]
    last = replace(middle, first=4, stop=5, stage=2)
    assert [last.holds(n) for n in names] == [False, False, True, True]
    assert not last.holds("visual.blocks.1.norm1.weight")
