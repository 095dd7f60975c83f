"""Rounds a layer's linear weights: to the nearest codes, or with error compensation over prompts (GPTQ).

GPTQ rounds columns one after another, and compensates each one's error in those not yet rounded. With G = X^T X of the
inputs X [tokens, in], rounding column j to q costs e = (w_j - q) / U[j, j], where U is the upper Cholesky factor of G's
inverse, and subtracting e U[j, k] from every later column k leaves the least error of the output (Frantar et al. 2022,
"GPTQ", equations 2 to 4 and algorithm 1). Columns with the largest inputs come first; groups remain consecutive
columns, and their scales are those of the original weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trencadis.core.quant.online_quant import ScaleSearch, codes_of, decode, finite, quantise, scales_of, spread
from trencadis.core.quant.quantised_tensor import SLAB, QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
from trencadis.core.quant.writing.calibration import Calibration, Gram
from trencadis.core.quant.writing.quantisation_recipe import Recipe
from trencadis.core.quant.writing.source_checkpoint import EXPERTS, Checkpoint, StoredWeight

DAMP = 0.01
"""Fraction of the mean of G's diagonal that is added to the diagonal."""
BLOCK = 128
"""Columns whose errors are applied to later blocks by one matrix product."""


@dataclass(frozen=True)
class LayerInputs:
    """Statistics of a weight's inputs that rounding needs; modules with the same input share them.

    Args:
        size: float32 [in], the diagonal of G.
        order: int64 [in], columns with the largest inputs first.
        factor: float32 [in, in], the Cholesky factor in that order; None: G has none, even when damped.
    """

    size: Tensor
    order: Tensor
    factor: Tensor | None

    @classmethod
    def of(cls, gram: Tensor) -> LayerInputs:
        """Computes the statistics from G, float32 [in, in]; up to three tensors of that size are held at a time."""
        size = gram.diagonal().clone()
        order = torch.sort(size, descending=True, stable=True).indices
        return cls(size, order, _factor(gram, size, order))


def round_compensated(
    weight: Tensor, inputs: LayerInputs, scheme: Scheme, dtype: torch.dtype, search: ScaleSearch, what: str
) -> QTensor:
    """Rounds a weight [out, in] for its inputs, in slabs of rows; without a factor, to the nearest codes.

    Raises:
        StartupError: a value is not finite.
    """
    (rows, columns), size, order, factor = weight.shape, inputs.size, inputs.order, inputs.factor
    group, importance = scheme.group or columns, size + DAMP * size.mean() if size.any() else None
    back = order.argsort()
    step = max(SLAB // columns, 1)
    codes, scales = [], []
    for start in range(0, rows, step):  # rows are independent of each other
        wide = finite(weight[start : start + step], scheme, what)
        scale = scales_of(wide, scheme, search, importance)
        each = spread(scale, columns, group)
        if factor is None:
            codes.append(codes_of(wide, each, scheme))
        else:
            walked = _walk(wide[:, order], factor, each.expand(wide.shape)[:, order], scheme)
            codes.append(walked.view(torch.int8)[:, back].view(walked.dtype))
        scales.append(scale)
    return QTensor(scheme, torch.cat(codes), torch.cat(scales), None, group, None, dtype)


def _factor(gram: Tensor, size: Tensor, order: Tensor) -> Tensor | None:
    """Returns the upper Cholesky factor of the inverse of ``gram`` in ``order``; None if there is none."""
    size, mean = size[order], float(size.mean())
    # Inputs that are always zero get an independent diagonal entry.
    size = torch.where(size > 0, size, mean or 1.0)
    for damp in (DAMP, 10 * DAMP, 100 * DAMP):
        held: Tensor = gram[order][:, order]  # keep few tensors, since the largest take gigabytes
        held.diagonal().copy_(size + damp * mean)
        held, failed = torch.linalg.cholesky_ex(held)
        if not bool(failed):
            held = torch.cholesky_inverse(held)
            held, failed = torch.linalg.cholesky_ex(held, upper=True)
            if not bool(failed) and bool(torch.isfinite(held).all()):
                return held
    return None


def _walk(weight: Tensor, factor: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Returns the codes of float32 [out, in], computed from the first column to the last; overwrites ``weight``."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn if scheme.kind == "float" else torch.int8)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        own, block = weight[:, start:stop].t().contiguous(), factor[start:stop, start:stop]
        scales, away = scale[:, start:stop].t().contiguous(), torch.empty((stop - start, rows))
        for j in range(stop - start):
            found = codes_of(own[j], scales[j], scheme)
            codes[:, start + j] = found
            away[j] = (own[j] - decode(found, scales[j])) / block[j, j]
            own[j + 1 :].addr_(block[j, j + 1 :], away[j], alpha=-1)
        weight[:, stop:].addmm_(away.t(), factor[start:stop, stop:], alpha=-1)
    return codes


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
