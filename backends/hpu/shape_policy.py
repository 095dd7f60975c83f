"""Launch shapes for Gaudi as data: rectangles for prompts without context, prompts with context, and decoding.

Torch-free; ``core.device_shape_policy.Policy`` explains the numbers. The ridge is Gaudi 2's 432 TFLOP/s in bfloat16
over 2.45 TB/s (its data sheet), scaled by the half of the peak that large products reach.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from trencadis.backends.hpu.hpu_settings import HpuSettings, settings
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import hccl_bytes
from trencadis.backends.hpu.start.gaudi_mode_and_env import will_be_lazy
from trencadis.core.buckets import LORA, Bucket, Stage, drafts_ahead, padded_tokens, target_bucket, verified_width
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device_shape_policy import (
    LARGEST,
    SMALLEST,
    AxisRule,
    Density,
    GraphMemory,
    InputSizes,
    PlannedModel,
    Policy,
)
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import FP8, INT8
from trencadis.core.quant.quantised_weight_layout_and_bytes import FLOATS8
from trencadis.core.request import MAX_BIAS, MAX_LOGPROBS
from trencadis.core.shapes.launch_costs import Costs
from trencadis.core.vision_config import WINDOW_SLOTS

PIECES = (1, 4, 16, 64, 512, 4096)
"""Numbers of rows of a piece. A launch of up to 256 rows has at most four pieces, one of up to 32,768 at most eight."""

STARTS = (32, 128, 512, 2048, 8192)
"""Numbers of tokens to which the start of a text launch is padded; beyond them, powers of two.

Embedding and rotary factors cover at most four times the tokens, which takes less than a hundredth of a layer's time.
"""


class StoredPiece(NamedTuple):
    """Rows [start, stop) of a launch."""

    start: int
    stop: int


def pieces(rows: int, sizes: Sequence[int] = PIECES) -> Iterator[StoredPiece]:
    """Yields pieces of one of ``sizes`` that cover ``rows`` > 0 rows; the last one may repeat rows of the one
    before.
    """
    size = max(p for p in sizes if p <= rows)
    for start in range(0, rows, size):
        begun = min(start, rows - size)
        yield StoredPiece(begun, begun + size)


def padded_start(tokens: int) -> int:
    """Returns the number of tokens that the start of a launch of ``tokens`` is compiled for."""
    return next((s for s in STARTS if s >= tokens), 1 << (tokens - 1).bit_length())


AXES = {
    Stage.FRESH: ("rows", "tokens"),
    Stage.CONTEXT: ("tokens", "blocks"),
    Stage.DECODE: ("rows", "blocks"),
    Stage.VISION: ("slots",),
    Stage.SAMPLE: ("rows",),
    Stage.RESET: ("rows",),
    Stage.POOL: ("rows",),
    Stage.VERIFY: ("rows", "blocks"),
}

ALIGNMENT = {
    Stage.FRESH: (1, 64),
    Stage.CONTEXT: (64, 1),
    Stage.DECODE: (1, 1),
    Stage.VISION: (WINDOW_SLOTS,),
    Stage.SAMPLE: (1,),
    Stage.RESET: (1,),
    Stage.POOL: (1,),
    Stage.VERIFY: (1, 1),
}

_FINE = 1 << 30

RULES = {
    Stage.FRESH: (
        AxisRule(),
        AxisRule(minimum=64, step=64, density=(Density(_FINE, 4),)),
        AxisRule(minimum=64, step=64),
    ),
    Stage.CONTEXT: (AxisRule(minimum=64, step=64, density=(Density(_FINE, 2),)), AxisRule(coarsest=16)),
    Stage.DECODE: (AxisRule(density=(Density(_FINE, 2),)), AxisRule(coarsest=4)),
    Stage.VISION: (AxisRule(minimum=WINDOW_SLOTS, step=WINDOW_SLOTS),),
    Stage.SAMPLE: (AxisRule(),),
    Stage.RESET: (AxisRule(),),
    Stage.POOL: (AxisRule(),),
    Stage.VERIFY: (AxisRule(), AxisRule(coarsest=4)),
}

CORNERS = {
    Stage.FRESH: (SMALLEST, SMALLEST),
    Stage.CONTEXT: (SMALLEST, SMALLEST),
    Stage.DECODE: (LARGEST, SMALLEST),
}


class OutputForm(NamedTuple):
    """One output of a launch: 32-bit values of a ``dtype``, [rows], or [rows, columns] where there are columns."""

    dtype: str
    columns: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return 4 * max(self.columns, 1)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of ``rows`` rows."""
        return (rows, self.columns) if self.columns else (rows,)


DRAWN = (OutputForm("int32"),)
REPORTED = (
    *DRAWN, OutputForm("float32"), OutputForm("int32"), OutputForm("int32", MAX_LOGPROBS),
    OutputForm("float32", MAX_LOGPROBS),
)  # fmt: skip


def list_held_outputs(bucket: Bucket) -> tuple[OutputForm, ...]:
    """Returns the outputs that launches of ``bucket`` store in two sets in turn where there are graphs.

    Those are the drawn ids and what is reported of them. None: outputs of other launches are copied on the card.
    """
    if bucket.stage is not Stage.SAMPLE:
        return ()
    kind = target_bucket(bucket)
    if kind.variant in ("greedy", "masked", "draw", "penalised"):
        return DRAWN
    return REPORTED if kind.variant == "full" or drafts_ahead(kind) else ()


def graph_input_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns ``input_bytes`` in lazy mode, with the tensors that outputs are stored in, and which of them is next."""
    held = list_held_outputs(bucket)
    return input_bytes(bucket, sizes) + (4 + 2 * bucket.dims[0] * sum(form.bytes for form in held) if held else 0)


def input_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns the exact bytes of a bucket's input tensors: 32-bit words and bytes, as packed by
    ``launches/input_and_output_copies.py``.
    """
    dims, vocab = bucket.dims, sizes.vocab
    bits, upto, units = -(-vocab // 8), 4 if sizes.upto else 0, planned_units(bucket.variant)
    upto += 8 * units + 4 if units else 0  # per unit: its visibility and count for each token, and its gate
    slot = 4 if bucket.variant == LORA else 0
    rows = 1 if bucket.stage is Stage.CONTEXT else dims[0]
    states = 16 * (rows + 1) if sizes.recurrent else 0
    match bucket.stage:
        case Stage.FRESH:
            return (32 + upto + slot) * dims[0] * dims[1] + 4 * dims[0] + 4 * units + states
        case Stage.CONTEXT:
            return (32 + upto + slot) * dims[0] + 4 * dims[1] + 4 + 4 * units + states
        case Stage.DECODE:
            seen = (8 * dims[0] + 4) * units + (4 * dims[0] if units else 0)
            return (32 + slot) * dims[0] + (16 if sizes.windows else 12) * dims[1] + seen + states
        case Stage.VERIFY:
            width = verified_width(bucket)
            return 32 * dims[0] * width + (8 + (8 if sizes.windows else 4) * width) * dims[1]
        case Stage.VISION:
            each = sizes.slot.values + 8 + 8 * sizes.slot.position_neighbours + slot
            windows = dims[0] // WINDOW_SLOTS * (12 if sizes.slot.padding_windows else 8)
            return dims[0] * each + (4 + slot) * sizes.slot.cells(dims[0]) + windows
        case Stage.SAMPLE:
            ahead = drafts_ahead(bucket)
            each = 48 + (4 + 4 * ahead if ahead else 0)
            return each * dims[0] + bits * (1 if bucket.variant == "greedy" else dims[0] + 1)
        case Stage.RESET:
            return dims[0] * (4 + 4 * vocab + bits + 8 * MAX_BIAS)
        case Stage.POOL:
            return 8 * dims[0]
    raise ValueError(f"{bucket} is no stage of this device")


def shared_input_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns ``input_bytes`` in compile mode, where the starts of text launches are padded to sizes that buckets
    share.
    """
    found = input_bytes(bucket, sizes)
    if bucket.stage not in (Stage.FRESH, Stage.CONTEXT, Stage.DECODE, Stage.VERIFY):
        return found
    tokens = padded_tokens(bucket)
    return found + START_BYTES * (padded_start(tokens) - tokens)


START_BYTES = 24
"""Bytes per token at the start of a launch: its id, its source slot, three positions, a row of the arena."""


TENSOR_CACHE = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
"""The plug-in compares this variable with ``1`` at every launch: any other text leaves the cache on."""


SERVING = Policy(
    axes=AXES,
    alignment=ALIGNMENT,
    mixed=False,
    adapters=True,
    joined_adapters=True,
    depth=1,
    overlaps=True,
    flat_kv=True,
    block_sizes=(128, 64, 32, 16),
    captures=True,
    cost=Costs(),
    rules=RULES,
    corners=CORNERS,
    capture_order="strategy",
    auto_operations=1e14,  # 7,700 tokens of a 7B, for which a Gaudi 2 computes a quarter of a second at least
    utilisation_of="free",
    pool_cost="sum",
    ridge=128.0,
    max_buckets=216,
    split_head=True,
    drawn_head=True,
    penalised_head=True,
    wide_head=True,
    drafts=True,
    inputs=graph_input_bytes,
    quantised=FLOATS8,
    host_kv=True,
    host_blocks=(1, 4),
    kv_codes={FP8: "float8_e4m3fn", INT8: "int8"},
    windows=True,
    upto=True,
    sinks=True,
    cross_attention=True,
    stages=True,
    encoder_data_parallel=True,
    recurrent=True,
)


class CompiledParts(NamedTuple):
    """The compiled functions of a plan in compile mode.

    Args:
        functions: compiled functions; buckets share those of equal shapes.
        executables: combinations of places in memory of a function's inputs, each of which is an executable: parts
            that run over pieces of a launch's rows have many, and one more drains the card's pipeline.
    """

    functions: int
    executables: int


def split_neighbours(inputs: Sequence[Hashable], size: int) -> Iterator[range]:
    """Yields neighbouring layers that run as one: ``size`` layers with equal ``inputs``, or one that is left over."""
    start = 0
    while start < len(inputs):
        alike = len(inputs) - start >= size and len(set(inputs[start : start + size])) == 1
        yield range(start, start + (size if alike else 1))
        start += size if alike else 1


class CompiledCounter:
    """Counts the compiled functions of one model, and the places in memory of their inputs.

    Args:
        group: layers of a DECODE or VERIFY launch in one function.
    """

    def __init__(self, model: PlannedModel, group: int) -> None:
        self.model = model
        self.found: set[tuple[Hashable, Hashable]] = set()
        # Each layer that sees images is a kind of its own: it reads its own columns of the arena.
        self.seeing = [number for number, layer in enumerate(model.layers) if layer.sees]
        self.alone = list(dict.fromkeys(layer.kind for layer in model.layers if not layer.sees))
        self.recurrent = any(layer.recurrent for layer in model.layers)
        self.joined: list[Hashable] = list(self.alone)
        if model.joins and not self.recurrent:
            starts = sorted({0, *model.taps})
            spans = [model.layers[a:b] for a, b in zip(starts, [*starts[1:], len(model.layers)], strict=True)]
            self.joined = list(
                {
                    tuple(span[i].kind for i in some)
                    for span in spans
                    for some in split_neighbours([layer.inputs for layer in span], group)
                }
            )

    def add(self, *function: Hashable, place: Hashable = None) -> None:
        """Adds a function that is called with inputs at ``place``."""
        self.found.add((function, place))

    def add_stored(self, name: str, rows: int, place: int = 0) -> None:
        """Adds a function that runs over pieces of ``rows`` rows."""
        for piece in pieces(rows):
            self.add(name, piece.stop - piece.start, place=(piece.start, place))

    def count(self) -> CompiledParts:
        """Returns the counts of all launches of the model."""
        for bucket in self.model.buckets:
            stage, rows = bucket.stage, bucket.dims[0]
            if stage in TEXTS:
                self._add_text(bucket)
            elif stage is Stage.VISION:
                self._add_images(bucket)
            elif stage is Stage.RESET:
                self.add_stored("reset", rows, rows)
            else:
                self.add("head", str(bucket))
                if bucket.variant in ("full", "draw", "penalised"):
                    self.add_stored("counts", rows)
            if bucket.variant == LORA and stage is not Stage.VISION:
                self.add("slots", padded_tokens(bucket), False, place=str(bucket))  # their masks
        return CompiledParts(len({function for function, _ in self.found}), len(self.found))

    def _add_images(self, bucket: Bucket) -> None:
        """Adds the functions of a VISION launch; those that adapters change once more for them."""
        assert self.model.images is not None
        slots, variant = bucket.dims[0], bucket.variant
        whole, by_rows, reals = self.model.images(slots)
        for name in whole:
            self.add(name, slots, variant if name in ("windows", "images") else "")
        for part in by_rows:
            self.add_stored(f"{part.name} {variant}", part.rows, 0 if part.computed else slots)
        if variant == LORA:  # the masks of slots, whose numbers are floats beside real numbers
            for count in (slots, by_rows[0].rows):
                self.add("slots", count, reals, place=str(bucket))

    def _add_text(self, bucket: Bucket) -> None:
        """Adds the functions of a text launch: start, masks, layers, end."""
        model, stage, tokens = self.model, bucket.stage, padded_tokens(bucket)
        decodes, begun = stage in (Stage.DECODE, Stage.VERIFY), padded_start(tokens)
        units = planned_units(bucket.variant)
        plain = dataclasses.replace(bucket, variant="") if units or bucket.variant == LORA else bucket
        shape = str(plain if units else bucket)
        for kind in self.joined if decodes and bucket.variant != LORA else self.alone:
            self.add("layer", shape, kind)
        self.add("start", begun)
        if units:
            self.add("rows of images", units, place=shared_input_bytes(plain, InputSizes(0)))  # behind the others
            for number in self.seeing:
                self.add("layer that sees", number, tokens, units, place=str(bucket))
        windowed = stage is not Stage.FRESH or any(0 < window < bucket.dims[1] for window in model.windows)
        upto = model.upto and not decodes
        if windowed or upto:
            self.add("masks", str(plain))
        if windowed and upto and model.causal_layers:
            self.add("causal masks", str(plain))
        if self.recurrent:
            rows = 1 if stage is Stage.CONTEXT else bucket.dims[0]
            self.add("rows of states", rows, tokens, place=str(bucket))
            self.add("states are stored", rows)
        if model.adds_rows:
            self.add("parts of images", tokens)
        self.add_stored("end", tokens, begun)
        if model.taps:
            self.add("stream", tokens)
            self.add_stored("states", tokens, begun)


TEXTS = (Stage.FRESH, Stage.CONTEXT, Stage.DECODE, Stage.VERIFY)
"""Stages that run the decoder's layers."""


def count_compiled(model: PlannedModel, switches: HpuSettings | None = None) -> CompiledParts:
    """Counts what the launches of a model compile."""
    switches = HpuSettings() if switches is None else switches
    if not switches.regional:
        return CompiledParts(len(model.buckets), len(model.buckets))
    return CompiledCounter(model, switches.decode_layers).count()


def describe_compiled(models: Sequence[PlannedModel], switches: HpuSettings | None = None) -> str:
    """Returns the sum of ``count_compiled`` as a line for users."""
    counts = [count_compiled(model, switches) for model in models]
    functions, executables = (sum(some) for some in zip(*counts, strict=True))
    return (
        f"compile mode: some {functions} functions are compiled at start, and run from {executables} places "
        "in memory, each an executable; warm-up makes all of them."
    )


def without_fp8(found: Policy) -> Policy:
    """Returns ``found`` for a plug-in without casts to and from 8-bit floats."""
    return dataclasses.replace(found, kv_codes={name: codes for name, codes in found.kv_codes.items() if name != FP8})


POLICIES = {"serving": SERVING}

COMPILE_MODE = "compile mode (PT_HPU_LAZY_MODE=0)"


def policy(name: str, environ: Mapping[str, str] | None = None, lazy: bool | None = None) -> Policy:
    """Returns the policy called ``name``, with the environment's settings of cuts and graph caches; empty means
    serving.

    Args:
        lazy: the mode, since HPU graphs exist in lazy mode alone; None: the one that a process with this environment
            runs in.

    Raises:
        StartupError: there is none of that name, or a variable cannot be read.
    """
    found = POLICIES.get(name or "serving")
    if found is None:
        raise StartupError(f"the hpu backend has no policy {name!r}; policies: {', '.join(POLICIES)}")
    environ = os.environ if environ is None else environ
    switches = settings(environ)
    found = dataclasses.replace(found, group_bytes=hccl_bytes(environ))
    kept = GraphMemory(
        cached=environ.get(TENSOR_CACHE, "") != "1", cut_layers=switches.cut_layers if switches.cuts else 0
    )
    graphs = will_be_lazy(environ) if lazy is None else lazy
    if graphs:
        return dataclasses.replace(found, graph_memory=dataclasses.replace(kept, outputs_apart=True), graphless="")
    return dataclasses.replace(
        found,
        graph_memory=kept,
        graphless=COMPILE_MODE,
        inputs=shared_input_bytes,
        compiled=partial(describe_compiled, switches=switches),
    )
