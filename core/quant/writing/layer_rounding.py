"""Rounds a layer's linear weights: to the nearest codes, or with error compensation over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.writing.calibration import Calibration, Gram
from trencadis.core.quant.writing.gptq_rounding import LayerInputs, round_compensated
from trencadis.core.quant.writing.recipe import Recipe
from trencadis.core.quant.writing.source_checkpoint import EXPERTS, Checkpoint, StoredWeight

SUMS = 2 << 30
"""Limit in bytes of the experts' input statistics per pass over the prompts; at least one expert is included."""


Say = Callable[[str], None]


def round_layer(
    checkpoint: Checkpoint, number: int, recipe: Recipe, calibration: Calibration | None, say: Say
) -> Iterator[tuple[StoredWeight, QTensor]]:
    """Yields the rounded weights of layer ``number``; those with the same input are adjacent.

    An expert's matrix that receives fewer inputs than it has columns is rounded to the nearest codes: its statistics do
    not have full rank, so compensation would increase the error on other inputs. (With as many inputs as columns, the
    error on other inputs is 0.3 to 1.0 of that of the nearest codes, with half as many up to 1.2; it is worse if the
    inputs' variances fall more slowly.)
    """
    linears, label = checkpoint.layers[number], checkpoint.config.name
    if calibration is None:
        for linear in linears:
            yield linear, _nearest(checkpoint, linear, recipe, checkpoint.tensors[linear.stored])
        return
    seldom = list[StoredWeight]()
    for some in _passes(checkpoint, linears):
        grams = calibration.grams(number, [linear.module for linear in some])
        shared: dict[int, list[StoredWeight]] = {}
        for linear in some:
            gram = grams.get(linear.module)
            if EXPERTS in linear.module and (gram is None or gram.rows < len(gram.sums)):
                seldom.append(linear)
            elif gram is not None:
                shared.setdefault(id(gram), []).append(linear)
        for alike in shared.values():
            inputs = _inputs(grams, alike)
            for linear in alike:
                weight, what = checkpoint.tensors[linear.stored], f"{label}: {linear.stored}"
                dtype = calibration.backend.dtype
                yield linear, round_compensated(weight, inputs, recipe.scheme, dtype, recipe.search, what)
    for linear in seldom:
        yield linear, _nearest(checkpoint, linear, recipe, checkpoint.tensors[linear.stored])
    if seldom:
        count = sum(EXPERTS in linear.module for linear in linears)
        say(
            f"layer {number + 1}: {len(seldom)} of its {count} experts' matrices saw fewer inputs than they have "
            "columns, and took the nearest codes; more prompts reach more experts"
        )


def _nearest(checkpoint: Checkpoint, linear: StoredWeight, recipe: Recipe, weight: Tensor) -> QTensor:
    what = f"{checkpoint.config.name}: {linear.stored}"
    return quantise(weight, recipe.scheme, weight.dtype, what, recipe.search)


def _inputs(grams: dict[str, Gram], alike: Sequence[StoredWeight]) -> LayerInputs:
    """Returns the statistics that rounding needs, and deletes the sums, which may take gigabytes."""
    found = LayerInputs.of(grams[alike[0].module].sums)
    for linear in alike:
        del grams[linear.module]
    return found


def _passes(checkpoint: Checkpoint, linears: Sequence[StoredWeight]) -> Iterator[list[StoredWeight]]:
    """Yields the modules whose statistics one pass over the prompts collects: all but experts, then as many experts
    as ``SUMS`` allows.
    """
    yield [linear for linear in linears if EXPERTS not in linear.module]
    each: dict[str, list[StoredWeight]] = {}
    for linear in linears:
        if EXPERTS in linear.module:
            each.setdefault(linear.module.rpartition(".")[0], []).append(linear)
    some, held = list[StoredWeight](), 0
    for matrices in each.values():
        inputs = {checkpoint.tensors[linear.stored].shape[1] for linear in matrices}
        size = sum(4 * columns**2 for columns in inputs)
        if some and held + size > SUMS:
            yield some
            some, held = [], 0
        some, held = [*some, *matrices], held + size
    if some:
        yield some
