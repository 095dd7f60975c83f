"""A tied table is held once: embeddings are read from the panels of the head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import kernel_kinds
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.native.kernel_choice_by_cpu import VARIABLE
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import BackendConfig
from trencadis.core.models.decoder import Decoder

TYPES = kernel_kinds.shared_types()
DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
TABLE = "model.embed_tokens.weight"
pytestmark = pytest.mark.skipif(not TYPES, reason="oneDNN's layout is not known here")


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernels serve on this CPU otherwise."""
    monkeypatch.setenv(VARIABLE, kernel_kinds.DENSE)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_panels_are_the_tables(dtype: torch.dtype) -> None:
    ops, generator = CpuOps(), torch.Generator().manual_seed(1)
    for vocab, hidden in ((64, 32), (130, 34), (1000, 90), (65, 2)):
        table = torch.randn((vocab, hidden), generator=generator).to(dtype)
        table[0, 0] = float("nan")
        weight = ops.pack_weight(table)
        ids = torch.tensor([0, vocab - 1, *range(0, vocab, 7), 5], dtype=torch.int32)
        slots = torch.zeros_like(ids)
        slots[-1], last = 1, torch.tensor([3, 4], dtype=torch.int32)
        images = torch.zeros_like(ids)
        images[2] = 1
        arena = torch.full((2, hidden), 7.0, dtype=dtype)
        shared = ops.table_of(weight)
        assert shared is not None and isinstance(weight, PackedWeight)
        assert shared.data_ptr() == torch.ops.mkldnn.data_ptr(weight.packed)
        found = ops.embed(ids, slots, last, images, arena, shared)
        wanted = ops.embed(ids, slots, last, images, arena, table)
        assert found.dtype == dtype and found.is_contiguous()
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (vocab, hidden)
    assert shared is not None
    del weight
    again = ops.embed(ids, slots, last, images, arena, shared)
    assert torch.equal(again.view(torch.uint8), wanted.view(torch.uint8)), "the panels were given back"


def demo(dtype: torch.dtype, more: dict[str, Tensor] | None = None) -> Decoder:
    """The text of the demo, whose head is tied; ``more``: tensors that the checkpoint has besides."""
    backend = make_backend(BackendConfig(dtype, options={"threads": str(torch.get_num_threads())}))
    made = Decoder(load_config(DEMO), backend)

    def stored() -> Iterator[tuple[str, Tensor]]:
        yield from open_weights(DEMO)
        yield from (more or {}).items()

    made.load(stored())
    return made


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("twice", [False, True])
def test_a_tied_table_is_held_once(dtype: torch.dtype, twice: bool) -> None:
    """Also where a checkpoint stores the table under the head's name, too."""
    held = dict(open_weights(DEMO))[TABLE]
    model = demo(dtype, {"lm_head.weight": held.clone()} if twice else None)
    head, table = model.lm_head.weights[0], model.embedding.table
    assert isinstance(head, PackedWeight) and table.data_ptr() == torch.ops.mkldnn.data_ptr(head.packed)
    ids = torch.arange(0, len(held), 3, dtype=torch.int32)
    nothing = torch.zeros_like(ids)
    arena = torch.zeros((1, held.shape[1]), dtype=dtype)
    found = model.embedding(ids, nothing, nothing[:1], nothing, arena)
    assert torch.equal(found, functional.embedding(ids, held.to(dtype)))
    assert model.embedding.nbytes() == held.numel() * dtype.itemsize


def test_a_head_of_its_own_leaves_the_table_alone() -> None:
    held = dict(open_weights(DEMO))[TABLE]
    model = demo(TYPES[0], {"lm_head.weight": held + 1})
    assert model.embedding.table.shape == held.shape and torch.equal(model.embedding.table, held.to(TYPES[0]))
