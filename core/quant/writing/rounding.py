"""The codes of a layer's linears: the nearest ones, or those that make up for each other's errors over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from trencadis.core.quant.online import quantised
from trencadis.core.quant.tensor import QTensor
from trencadis.core.quant.writing.calibration import Calibration, Gram
from trencadis.core.quant.writing.gptq import LayerInputs, compensated
from trencadis.core.quant.writing.recipe import Recipe
from trencadis.core.quant.writing.stored import EXPERTS, Checkpoint, StoredWeight

SUMS = 2 << 30
"""Bytes of sums of products that a pass over the prompts may hold of experts; one expert's are held in any case."""


Say = Callable[[str], None]


def rounded(
    checkpoint: Checkpoint, number: int, recipe: Recipe, calibration: Calibration | None, say: Say
) -> Iterator[tuple[StoredWeight, QTensor]]:
    """The weights of layer ``number``, those over one input after one another.

    An expert's matrix that fewer inputs reach than it has columns is rounded to the nearest codes: their sum of
    products has no full rank, and what it compensates it takes from inputs that were not seen. (With as many inputs as
    columns, the error over other inputs is 0.3 to 1.0 of the nearest codes', with half as many up to 1.2: the slower
    the inputs' variances fall, the worse.)
    """
    places, label = checkpoint.layers[number], checkpoint.config.name
    if calibration is None:
        for place in places:
            yield place, _nearest(checkpoint, place, recipe, checkpoint.tensors[place.stored])
        return
    seldom = list[StoredWeight]()
    for some in _passes(checkpoint, places):
        grams = calibration.grams(number, [place.module for place in some])
        shared: dict[int, list[StoredWeight]] = {}
        for place in some:
            gram = grams.get(place.module)
            if EXPERTS in place.module and (gram is None or gram.rows < len(gram.sums)):
                seldom.append(place)
            elif gram is not None:
                shared.setdefault(id(gram), []).append(place)
        for alike in shared.values():
            inputs = _inputs(grams, alike)
            for place in alike:
                weight, what = checkpoint.tensors[place.stored], f"{label}: {place.stored}"
                dtype = calibration.backend.dtype
                yield place, compensated(weight, inputs, recipe.scheme, dtype, recipe.search, what)
    for place in seldom:
        yield place, _nearest(checkpoint, place, recipe, checkpoint.tensors[place.stored])
    if seldom:
        count = sum(EXPERTS in place.module for place in places)
        say(
            f"layer {number + 1}: {len(seldom)} of its {count} experts' matrices saw fewer inputs than they have "
            "columns, and took the nearest codes; more prompts reach more experts"
        )


def _nearest(checkpoint: Checkpoint, place: StoredWeight, recipe: Recipe, weight: Tensor) -> QTensor:
    what = f"{checkpoint.config.name}: {place.stored}"
    return quantised(weight, recipe.scheme, weight.dtype, what, recipe.search)


def _inputs(grams: dict[str, Gram], alike: Sequence[StoredWeight]) -> LayerInputs:
    """What rounding must know; the sums themselves are let go, since they may take gigabytes."""
    found = LayerInputs.of(grams[alike[0].module].sums)
    for place in alike:
        del grams[place.module]
    return found


def _passes(checkpoint: Checkpoint, places: Sequence[StoredWeight]) -> Iterator[list[StoredWeight]]:
    """What one pass over the prompts sums up: all but experts, then as many experts as ``SUMS`` allows."""
    yield [place for place in places if EXPERTS not in place.module]
    each: dict[str, list[StoredWeight]] = {}
    for place in places:
        if EXPERTS in place.module:
            each.setdefault(place.module.rpartition(".")[0], []).append(place)
    some, held = list[StoredWeight](), 0
    for matrices in each.values():
        inputs = {checkpoint.tensors[place.stored].shape[1] for place in matrices}
        size = sum(4 * columns**2 for columns in inputs)
        if some and held + size > SUMS:
            yield some
            some, held = [], 0
        some, held = [*some, *matrices], held + size
    if some:
        yield some
