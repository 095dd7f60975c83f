"""The kernels that a decoding step launches, recorded from the code that serving runs: the model's bodies over the
card's ops.

Tensors have shapes and no memory, so a 72B model is recorded in a second. Each launch of a Triton kernel and each call
of torch that starts a kernel is a ``RecordedKernel``; the recording of one layer counts for all equal layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes, arrays
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.shape_policy import policy
from trencadis.backends.cuda.time_estimates.kernel_times import (
    ATTENTION,
    COLLECTIVE,
    HEAD,
    PRODUCT,
    ROWS,
    RecordedKernel,
    TileLoads,
)
from trencadis.backends.cuda.weights.decoded_pieces import choose_programs
from trencadis.backends.cuda.weights.quantised_weight import E4M3, E5M2, FP4, INT4, INT8
from trencadis.core.buckets import Bucket, Stage, verify_variant
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.host_inputs import SampleRow, head_inputs
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.memory.memory_estimator import kv_heads
from trencadis.core.models import model_loader
from trencadis.core.step import Sample
from trencadis.core.vision_config import NO_SLOT

KernelArguments = Mapping[str, Any]
"""Arguments of a launch of a kernel by name: tensors and numbers."""
BLOCK = 16
META = torch.device("meta")

CHUNK = 8192
"""Tokens of a launch of a prompt, at most."""

DECODING = {
    "coded_skinny_kernel": {INT4: 3.7, INT8: 4.1, E4M3: 3.1, E5M2: 3.6},
    "coded_skinny_kernel, 8 rows": {INT4: 3.1, INT8: 3.4, E4M3: 2.6, E5M2: 3.0},
    "quantised_kernel": {INT4: 8.9, INT8: 5.4, E4M3: 5.3, E5M2: 8.9},
    "decoding_kernel": {INT4: 8.8, INT8: 7.8, E4M3: 7.0, E5M2: 7.0},
}
"""Kernel, or kernel with tiles of so many rows -> kind of codes -> instructions of a lane for each of them, all that a
trip has: the most of those compiled for sm_90 in bfloat16 (docs/kernels.csv has trips); ``quantised_kernel`` for 64
rows. Those of e5m2 are not counted: they are taken to be as many as e4m3's, or as those of 4 bits.
"""

EXPERT_DECODING = {
    16: {INT4: 4.2, INT8: 4.4, E4M3: 3.8, E5M2: 3.8, FP4: 5.5},
    64: {INT4: 8.7, INT8: 9.8, E4M3: 8.0, E5M2: 8.0, FP4: 9.9},
    128: {INT4: 9.9, INT8: 12.6, E4M3: 11.6, E5M2: 11.6, FP4: 8.5},
}
"""Pairs of a tile of experts -> the same of their kernels. Rounded activations by integers: ``INTEGERS``."""

INTEGERS = 2.1
"""Instructions of a lane for each integer of 8 bits that experts multiply by integers, at most."""

ROUNDED_PRODUCTS = ("_scaled_mm", "_scaled_mm_v2")
"""Torch's products of 8-bit floats by 8-bit floats: with scales of rows, and with those of blocks."""

EIGHT_BITS = 2.0
"""Rate of products of 8 bits by 8 bits, over that of 16 bits."""

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", *ROUNDED_PRODUCTS)
NO_KERNEL = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "view", "_unsafe_view", "reshape",
    "_reshape_alias", "transpose", "t", "split", "split_with_sizes", "slice", "select", "unsqueeze", "squeeze",
    "expand", "permute", "as_strided", "detach", "alias", "unbind",
)  # fmt: skip
"""Torch calls that start no kernel."""


GRID = ((1 << 31) - 1, 65_535, 65_535)
"""Most programs of a launch along each axis."""


def check_grid(grid: tuple[int, ...], name: str = "") -> None:
    """Checks the programs of a launch.

    Raises:
        ValueError: a card does not launch so many along one axis.
    """
    for axis, (count, most) in enumerate(zip(grid, GRID, strict=False)):
        if count > most:
            raise ValueError(f"{name}: {count} programs along axis {axis} of a grid, of at most {most}")


class KernelRecorder:
    """Records the kernels that a step launches, instead of launching them: ``with
    KernelRecorder(...).recording():``.

    Args:
        context: keys of each row.
        seen: keys that all tokens see together; 0: each row has one token, which sees all of its row's.
        processors: of the card.
    """

    def __init__(self, context: Sequence[int], seen: int = 0, processors: int = 132) -> None:
        self.kernels: list[RecordedKernel] = []
        self._processors = processors
        self._context = context
        self._seen = seen or sum(context)

    def record_collective(self, x: Tensor) -> None:
        """Records a collective over ``x``."""
        self.kernels.append(RecordedKernel("all_reduce", COLLECTIVE, x.nbytes))

    def record_launch(self, name: str, args: KernelArguments, programs: int = 0) -> None:
        """Records a launch of a Triton kernel."""
        found = _READS.get(name, _all_bytes)(args, self._context)
        kind = ATTENTION if name in ATTENDING else HEAD if name in HEADS else ROWS
        flops = codes = 0
        tiles = TileLoads()
        decoding = DECODING.get(f"{name}, {args.get('M')} rows") or DECODING.get(name, {})
        each = decoding.get(args.get("KIND", -1), 0.0)
        integers = name in INTEGER_PRODUCTS and args.get("ROUNDED") and args.get("KIND") == INT8
        rate = EIGHT_BITS if integers else 1.0
        if name in ATTENDING[:-1]:
            flops = 4 * self._seen * args["out"].shape[1] * args["out"].shape[2]
        if name.startswith(("quantised", "experts", "skinny", "coded_skinny", "coded_experts")):
            kind = PRODUCT
        if name == "skinny_kernel":
            flops = 2 * args["x"].shape[0] * args["weight"].numel()
        if name == "quantised_kernel":
            rows = args["x"].shape[0]
            codes = len(args["codes"]) * args["columns"] * -(-rows // args["M"])
            flops = 2 * rows * len(args["codes"]) * args["columns"]
        if name == "coded_skinny_kernel":
            codes = len(args["codes"]) * args["COLUMNS"]
            flops = 2 * args["x"].shape[0] * codes
        if name == "decoding_kernel":
            codes = args["out"].numel()
        if name in EXPERTS:
            flops, programs = 2 * len(args["out"]) * args["weight"][0].numel(), 0
        if name in (*EXPERTS, *CODED_EXPERTS):
            tiles = _tile_traffic(args)
        if name in CODED_EXPERTS:
            each_expert = args["codes"].shape[1] * args["columns"]
            flops, programs = 2 * len(args["out"]) * each_expert, 0
            codes = round(_filled_tiles(len(args["codes"]), len(args["out"]), args["M"]) * each_expert)
            of_kind = EXPERT_DECODING[max(m for m in EXPERT_DECODING if m <= args["M"])]
            each = INTEGERS if integers else of_kind[args["KIND"]]
        if name in _STATE_PRODUCTS:
            codes, each = _STATE_PRODUCTS[name](args), 1.0
        waves = programs if flops else 0
        self.kernels.append(RecordedKernel(name, kind, found, flops, codes, each, waves, rate, *tiles))

    def record_call(self, name: str, args: object, out: object) -> None:
        """Records a call of torch."""
        given = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        positional = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)] if isinstance(args, tuple) else given
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        moved = sum(t.nbytes for t in (*given, *made))
        if name in PRODUCTS:
            x, w = positional[:2] if name in ROUNDED_PRODUCTS else positional[-2:]
            rows, columns = x.shape[-2], w.shape[-1]
            programs = choose_programs(rows, columns, self._processors).programs
            flops = 2 * rows * x.shape[-1] * columns
            rate = EIGHT_BITS if name in ROUNDED_PRODUCTS else 1.0
            self.kernels.append(RecordedKernel(name, PRODUCT, moved, flops, programs=programs, rate=rate))
        elif name not in NO_KERNEL:
            self.kernels.append(RecordedKernel(name, ROWS, moved))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which launches are recorded instead of run."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
        kept = [kind.run for kind in kinds]

        def note(kernel: Any, *args: Any, grid: object = None, warmup: bool = False, **kwargs: Any) -> None:
            name = getattr(kernel, "__name__", "") or kernel.fn.__name__
            programs = 0
            if isinstance(grid, tuple):
                check_grid(grid, name)
                programs = math.prod(grid)
            self.record_launch(name, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, programs)

        for kind in kinds:
            kind.run = note
        try:
            with _Calls(self), torch.no_grad():
                yield
        finally:
            for kind, run in zip(kinds, kept, strict=True):
                kind.run = run


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: KernelRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._recorder.record_call(func.overloadpacket.__name__, (args, kwargs or {}), out)
        return out


ATTENDING = ("items_kernel", "turned_items_kernel", "verify_items_kernel", "join_kernel")
EXPERTS = ("experts_kernel", "experts_down_kernel")
"""Products of pairs of a token and an expert."""

CODED_EXPERTS = ("coded_experts_kernel", "coded_experts_down_kernel")
"""Those by codes."""

INTEGER_PRODUCTS = ("quantised_kernel", *CODED_EXPERTS)
"""Kernels that multiply rounded activations as integers."""

HEADS = ("greedy_parts_kernel", "greedy_pick_kernel", "parts_kernel", "draw_kernel", "told_kernel")


def _all_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of all tensors of a launch, each counted once."""
    return sum(t.nbytes for t in {id(t): t for t in args.values() if isinstance(t, Tensor)}.values())


def _attention_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of each stored key and value once, plus queries and results."""
    k, q = args["k"], args["out"]
    return int(2 * sum(context) * k.shape[2] * k.shape[3] * k.itemsize + 2 * q.nbytes)


def _skinny_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of the weight, of inputs and outputs, and of the sums of the pieces, written and read."""
    parts = {id(args[name]): args[name] for name in ("x", "added", "residual", "out")}
    sums = 2 * args["sums"].nbytes if args["PIECES"] > 1 else 0
    return int(args["weight"].nbytes + sum(t.nbytes for t in parts.values()) + sums)


def _chosen_experts(count: int, pairs: int) -> float:
    """Returns how many of ``count`` experts some of ``pairs`` pairs have, if experts are chosen at random."""
    return count * (1 - (1 - 1 / count) ** pairs)


def _filled_tiles(count: int, pairs: int, rows: int) -> float:
    """Returns the tiles of ``rows`` pairs: one of each chosen expert; of many pairs, half a tile of each expert more
    than they fill.
    """
    chosen = _chosen_experts(count, pairs)
    return max(chosen, pairs / rows + chosen / 2)


def _tile_traffic(args: KernelArguments) -> TileLoads:
    """Returns the bytes that the programs of experts load, and the rows of their tiles over the pairs that they have.

    A program loads the rows of its tile and the weights of its features.
    """
    out, x = args["out"], args["x"]
    weight: Tensor = args["weight"] if "weight" in args else args["codes"]
    (count, features, width), m = weight.shape, args["M"]
    columns = args.get("columns", width)
    tiles, blocks = _filled_tiles(count, len(out), m), -(-out.shape[1] // args["N"])
    beside = features // out.shape[1]  # 2: gates and ups
    weights = tiles * blocks * args["N"] * beside * width * weight.itemsize
    loads = weights + tiles * blocks * m * columns * x.itemsize
    return TileLoads(round(loads), round(weights), tiles * m / len(out))


def _expert_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of the experts that some pair has, as many as of experts chosen at random, and of the pairs."""
    pairs, out = len(args["out"]), args["out"]
    names = ("weight",) if "weight" in args else ("codes", "factor", "scale", "zero")
    parts = {id(args[name]): args[name] for name in names}.values()  # a weight without zero points has none
    count = len(args[names[0]])
    share = _chosen_experts(count, pairs) / count
    return int(share * sum(t.nbytes for t in parts) + args["x"].nbytes + out.nbytes)


def _join_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of the partial results of the items, at most all that the capacity allows, plus the output."""
    held = args["part"].nbytes + args["weight"].nbytes
    rows = args["out"].nbytes
    pieces = sum(-(-keys // 256) for keys in context)
    return int(min(held, 2 * rows * pieces // max(len(context), 1)) + rows)


def _logits_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of a launch's logits; the tables of all slots are only read for rows with penalties."""
    found = args.get("logits")
    return int(found.nbytes) if isinstance(found, Tensor) else 0


def _rotary_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of queries, keys and values, read and written, without the rest of the cache."""
    return 2 * sum(int(args[name].nbytes) for name in ("q", "k", "v") if isinstance(args.get(name), Tensor))


def _state_bytes(args: KernelArguments, context: Sequence[int]) -> int:
    """Returns the bytes of the state of each row, read and written, and of all other tensors."""
    state = args["state"]
    return int(2 * len(context) * state[0].nbytes) + _all_bytes({**args, "state": None}, context)


def _step_products(args: KernelArguments) -> int:
    """Returns the multiplications of single tokens: state and key, state and query, and the change."""
    return int(3 * args["out"].shape[0] * args["state"][0].numel())


def _scan_products(args: KernelArguments) -> int:
    """Returns the multiplications of chunks with the state and with one another, which float32 takes."""
    c, dk, dv = args["C"], args["DK"], args["DV"]
    systems = args["squares"].shape[0] * args["squares"].shape[1]
    return int(systems * c * dv * (3 * dk + 2 * c))


def _square_products(args: KernelArguments) -> int:
    """Returns the multiplications of the triangular systems of chunks, and of their inverses."""
    c = args["C"]
    return int(args["squares"].shape[0] * args["squares"].shape[1] * c * c * (2 * args["DK"] + c))


_STATE_PRODUCTS: dict[str, Callable[[KernelArguments], int]] = {
    "step_kernel": _step_products, "net_kernel": _step_products, "scan_kernel": _scan_products,
    "squares_kernel": _square_products,
}  # fmt: skip
"""Kernel of a recurrent layer -> function that counts its multiplications, of which a lane does one at a time."""

_READS: dict[str, Callable[[KernelArguments, Sequence[int]], int]] = {
    "items_kernel": _attention_bytes,
    "turned_items_kernel": _attention_bytes,
    "verify_items_kernel": _attention_bytes,
    "skinny_kernel": _skinny_bytes,
    **dict.fromkeys((*EXPERTS, *CODED_EXPERTS), _expert_bytes),
    "join_kernel": _join_bytes,
    "decoding_kernel": lambda args, context: args["out"].nbytes + args["out"].shape[0] * args["codes"].shape[1],
    "rope_kernel": _rotary_bytes,
    **dict.fromkeys(
        ("step_kernel", "net_kernel", "scan_kernel", "conv_step_kernel", "conv_state_kernel"), _state_bytes
    ),
    "_embed": lambda args, context: 2 * args["out"].nbytes,
    "_gather": lambda args, context: 2 * args["out"].nbytes,
    "_scatter": lambda args, context: 2 * args["values"].nbytes,
    **dict.fromkeys(HEADS, _logits_bytes),
}
"""Kernel -> function that counts its bytes, for kernels that read only a part of their arguments."""


class MeteredRanks:
    """``core.device.backend.Comm`` of rank 0 of ``world`` that records collectives instead of running them."""

    def __init__(self, world: int) -> None:
        self.rank, self.world = 0, world
        self.recorder: KernelRecorder | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self._note(x)
        return x.new_empty(*x.shape[:-1], x.shape[-1] * self.world)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def _note(self, x: Tensor) -> None:
        if self.recorder is not None and self.world > 1:
            self.recorder.record_collective(x)


class OpByOp(CudaOps):
    """Ops that run every layer op by op, as other engines do."""

    whole_layers: ClassVar[bool] = False


class MetaCard:
    """The subset of ``core.device.backend.Backend`` that a model's bodies need, over meta tensors."""

    name, values, device, notes = "cuda", False, META, ()

    def __init__(self, world: int, whole_layers: bool = True) -> None:
        ops = CudaOps() if whole_layers else OpByOp()
        self.dtype, self.ops, self.comm = torch.bfloat16, ops, MeteredRanks(world)
        self.policy = dataclasses.replace(policy(""), host_weights=False)
        self.slot = NO_SLOT

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=META)


class DecodeRecorder:
    """Records decoding steps and prompts of one model on one of ``ranks`` cards; without ``whole_layers`` op by op."""

    def __init__(self, model: ModelConfig, ranks: int = 1, processors: int = 132, whole_layers: bool = True) -> None:
        self.config, self.ranks, self.processors = model, ranks, processors
        self.card: Any = MetaCard(ranks, whole_layers)
        card: Any = self.card
        self.model: Any = model_loader.load_model(model, card, EngineConfig(load_format="dummy", dtype="bfloat16"))
        forms = [kv_heads(form, ranks) for form in model.text.layer_forms]
        self.heads = forms[0]
        self.group = max(max(-(-model.text.heads // ranks) // heads, 1) for heads in forms)
        self.card.ops.query_group = self.group if len(set(forms)) > 1 else 0

    def step(self, rows: int, context: int, draws: bool = False, width: int = 1) -> list[RecordedKernel]:
        """Records what one step launches for ``rows`` rows of ``context`` keys each: DECODE, and SAMPLE.

        Args:
            width: tokens of a row; more than 1: VERIFY instead of DECODE.
        """
        blocks, tokens = -(-(context + width) // BLOCK), rows * width
        held = allocate_persistent(
            self.config, self.card, blocks=64, block_size=BLOCK, arena_rows=4, seqs=tokens, tokens=max(tokens, 16)
        )
        self.model.bind(held)
        text = self.config.text
        sizes = self._sizes(blocks)
        seen = rows * (width * context + width * (width + 1) // 2)
        recorder = self.card.comm.recorder = KernelRecorder([context + width] * rows, seen, self.processors)
        bucket = Bucket(Stage.VERIFY, (rows,), verify_variant(width)) if width > 1 else Bucket(Stage.DECODE, (rows,))
        launch = _tensors(arrays(bucket, _equal_rows(rows, width, context, blocks), sizes))
        inputs = head_inputs([SampleRow(1 + i, 1 + i // width, Sample(full=draws)) for i in range(tokens)], text.vocab)
        sample = _tensors(arrays(Bucket(Stage.SAMPLE, (tokens,), "draw" if draws else "greedy"), inputs, sizes))
        with recorder.recording():
            self.model.text(launch)
            if draws:
                self.model.drawn_head(sample)
            else:
                self.model.head(sample, False)
        self.card.comm.recorder = None
        return recorder.kernels

    def _sizes(self, blocks: int) -> Sizes:
        text = self.config.text
        return Sizes(
            BLOCK, blocks, text.vocab, self.heads, self.processors, group=self.group,
            recurrent=text.recurrent is not None,
        )  # fmt: skip

    def prompt(self, tokens: int) -> list[list[RecordedKernel]]:
        """Records what a prompt of ``tokens`` tokens launches, a list for each of its launches."""
        made = []
        for begin in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - begin)
            made.append(self._chunk(count, begin, begin + count == tokens))
        return made

    def _chunk(self, tokens: int, before: int, last: bool) -> list[RecordedKernel]:
        """Records ``tokens`` tokens of one row after ``before`` stored ones, and SAMPLE if they are the ``last``."""
        blocks = -(-(before + tokens + 1) // BLOCK)
        held = allocate_persistent(
            self.config, self.card, blocks=64, block_size=BLOCK, arena_rows=4, seqs=1, tokens=max(tokens, 16)
        )
        self.model.bind(held)
        text = self.config.text
        sizes = self._sizes(blocks)
        seen = tokens * before + tokens * (tokens + 1) // 2
        recorder = self.card.comm.recorder = KernelRecorder([before + tokens], seen, self.processors)
        inputs = _equal_rows(1, tokens, before, blocks)
        launch = _tensors(arrays(Bucket(Stage.PREFILL, (tokens, 1)), inputs, sizes))
        head = head_inputs([SampleRow(1, 1, Sample(full=False))], text.vocab)
        sample = _tensors(arrays(Bucket(Stage.SAMPLE, (1,), "greedy"), head, sizes))
        with recorder.recording():
            self.model.text(launch)
            if last:
                self.model.head(sample, False)
        self.card.comm.recorder = None
        return recorder.kernels


def _equal_rows(rows: int, tokens: int, before: int, blocks: int) -> StepInputs:
    """Returns inputs of ``rows`` rows of ``tokens`` tokens each after ``before`` stored ones, over the same blocks."""
    index, nothing = np.arange(rows + 1, dtype=np.int32), np.zeros(rows * tokens, np.int32)
    return StepInputs(
        tokens=nothing, from_slot=nothing, positions=np.zeros((3, rows * tokens), np.int32), image_row=nothing,
        out_row=np.arange(1, rows * tokens + 1, dtype=np.int32), row_start=index * tokens,
        context=np.full(rows, before, np.int32), blocks=np.full((rows, blocks), 2, np.int32), slot=index[1:],
        adapter=np.zeros(rows, np.int32),
    )  # fmt: skip


def _tensors(tree: Any) -> Any:
    """Replaces arrays by tensors without memory."""
    if isinstance(tree, np.ndarray):
        return torch.empty(tree.shape, dtype=torch.from_numpy(np.empty(0, tree.dtype)).dtype, device=META)
    return tree if tree is None else type(tree)(*map(_tensors, tree))
