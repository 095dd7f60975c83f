"""The interface between engine and device: protocols, the tensors that are passed, and the lookup of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from trencadis.core.buckets import Bucket
from trencadis.core.device.communicators_and_rank_agreement import Comm as Comm
from trencadis.core.device.communicators_and_rank_agreement import Pipe as Pipe
from trencadis.core.device.launch_tensors import AdapterWeights as AdapterWeights
from trencadis.core.device.launch_tensors import Attn as Attn
from trencadis.core.device.launch_tensors import ExpertBiases as ExpertBiases
from trencadis.core.device.launch_tensors import HeadTensors as HeadTensors
from trencadis.core.device.launch_tensors import HeadTensorsOut as HeadTensorsOut
from trencadis.core.device.launch_tensors import LayerKV as LayerKV
from trencadis.core.device.launch_tensors import PackedAdapters as PackedAdapters
from trencadis.core.device.launch_tensors import PoolTensors as PoolTensors
from trencadis.core.device.launch_tensors import PoolTensorsOut as PoolTensorsOut
from trencadis.core.device.launch_tensors import ResetTensors as ResetTensors
from trencadis.core.device.launch_tensors import Rotary as Rotary
from trencadis.core.device.launch_tensors import RotatedHeads as RotatedHeads
from trencadis.core.device.launch_tensors import SamplerState as SamplerState
from trencadis.core.device.launch_tensors import Segments as Segments
from trencadis.core.device.launch_tensors import SinksArgument as SinksArgument
from trencadis.core.device.launch_tensors import TensorsOut as TensorsOut
from trencadis.core.device.launch_tensors import TextTensors as TextTensors
from trencadis.core.device.launch_tensors import VisionTensors as VisionTensors
from trencadis.core.device.launch_tensors import host_output as host_output
from trencadis.core.device.launch_tensors import slots_at as slots_at
from trencadis.core.device.packed_weights_file import PackedFile
from trencadis.core.device_shape_policy import Policy
from trencadis.core.devices import BUILT, TABLE, find_installed_backend, import_backend, list_devices
from trencadis.core.errors import StartupError
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.step_output import HeadOutput, PoolOutput
from trencadis.core.vision_config import SlotForm

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ProgramState(IntEnum):
    """The state of a program, in ascending order: planned, compiled, captured as a graph."""

    PLANNED = 0
    COMPILED = 1
    CAPTURED = 2


class OutOfDeviceMemory(RuntimeError):
    """Raised when the device has not enough memory for a program; what was allocated before stays intact."""


class Pending(Protocol[T_co]):
    """A result that is being fetched to the host."""

    def done(self) -> bool: ...

    def result(self) -> T_co: ...


class Weight(Protocol):
    """A linear layer's weight in the layout of its backend (``Ops.pack_weight``)."""

    out_features: int
    in_features: int


class ExpertWeights(Protocol):
    """The experts of one layer in their backend's layout (``Ops.pack_experts``).

    ``count`` is the number of experts, ``inner`` the columns of one expert on this rank.
    """

    count: int
    inner: int


AdapterRows = Tensor | tuple[object, ...]
"""Which tokens of a launch have which adapter, in the form that the device's ``Ops`` use."""


class Ops(Protocol):
    """The functions that a device may replace. Stateless: weights come in, tensors go out; shapes are static.

    n tokens, h query heads, g KV heads, d head size, s vision slots, r rows, V vocabulary. Values have the backend's
    dtype unless another one is named.

    Attributes:
        copies: True if ``pack_weight`` copies the weight, so that the caller may reuse the weight's memory.
    """

    copies: bool

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight [out, in] and a bias [out]."""

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs a quantised weight [out, in] and a bias [out]; ``linear`` multiplies by its dequantised values.

        If ``Policy.quantised`` is ``FLOATS8``, the tensors of ``q`` lie on the host.
        """

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        """Returns x [n, in] times the packed weight, plus its bias: [n, out]."""

    def prepare_adapters(self, slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> AdapterRows:
        """Computes once a launch what all layers need of the slots of its tokens, int32 [n]; 0: no adapter.

        ``numbers``: int32 [slots], the numbers of the slots from 1 on; ``dtype``: that of the activations.
        """
        ...

    def add_adapters(self, y: Tensor, x: Tensor, w: AdapterWeights | PackedAdapters, rows: AdapterRows) -> Tensor:
        """Returns y [n, out] plus, for each token with an adapter, x [n, in] times A and B of its slot.

        May change ``y``.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum), [n, width] each. The sum x [+ residual] is the new residual stream.

        In a 16-bit model, a float32 weight is multiplied before the norm is rounded to 16 bits.
        """
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum), like ``rms_norm``; the norm is (sum - mean) / deviation * weight +
        bias.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu of the first half of ``gate_up`` times its second half: [n, 2 x inner] -> [n, inner]."""

    def act(self, x: Tensor, kind: str) -> Tensor:
        """Applies ``silu``, ``gelu``, ``gelu_tanh``, ``quick_gelu``, ``relu`` or its square ``relu2`` to [n, width]."""

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        """Returns the activation of the first half of ``gate_up`` times its second half: [n, 2 x inner] -> [n,
        inner].

        ``clamped_swiglu``: with gates up to 7 and ups within 7 of 0, (up + 1) * gate * sigmoid(1.702 * gate).
        """

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        """Packs gate_up [2 x inner, hidden] and down [hidden, inner] of each expert; callers omit ``biases`` if there
        are none.

        Experts without gates have [inner, hidden] in place of gate_up, and no biases.
        """
        ...

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        """Runs MLPs, with gates or without, [n, hidden] -> [n, hidden]: for each token, the weighted sum of its ``top``
        best-scored experts, of equal scores those with the lower numbers; a Gaudi takes any of equal ones.

        Args:
            scores: [n, count], the router's output; an expert's weight is the float32 softmax of the scores over all
                experts.
            normalise: if True, the weights of a token's experts are divided by their sum.
            kind: the activation, as for ``act``.
        """
        ...

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        """Returns the rotary factors (cos and sin) of int32 positions [axes, n] (vision: [n, axes]).

        ``inv_freq`` is float32 [d / 2]; ``axis`` is int64 [d / 2], the position axis of each frequency.
        """

    def prepare_attn(self, attn: Attn, heads: int, kv: LayerKV) -> Attn:
        """Computes once a launch what the attention of all layers shares, e.g. masks; may return ``attn`` itself.

        ``heads`` is the number of query heads of this rank; ``kv`` is any layer's cache, for its shape and dtype.
        """

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        """Rotates q [n, h, d] and k [n, g, d], and stores k and v [n, g, d] in the cache.

        Returns the k and v of this launch, with k rotated. A device whose attention reads all keys from the cache may
        return k and v unchanged.
        """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention of q [n, h, d] over the paged cache -> [n, h, d]; q, k and v come from ``rope_store``.

        A token at position p of its row attends to the keys up to p (up to ``attn.upto`` if the launch has it). With a
        sliding ``window`` (constant per layer), only keys from p - window + 1 on count. With ``sinks``, float32
        [h], each token also has one further score of its head, which is not scaled, counts in the softmax and has no
        value; a token without visible keys then gives zeros. Callers omit the arguments if the layer has no window or
        no sinks, so that a device which serves no such model need not accept them.
        """

    def patches(self, pixels: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts uint8 pixels [s, values] to pixels * scale + shift, [s, values] of ``dtype``.

        If ``Policy.aligned`` is above 1, ``scale`` and ``shift`` may be longer than a slot: missing pixels count as 0.
        """

    def prepare_segments(self, seg: Segments, merged: int = 1) -> Segments:
        """Computes once a launch what tower layers share that have a row for ``merged`` slots; may return ``seg``."""

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotates q and k, [s, heads, d] each."""

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention inside windows of WINDOW_SLOTS slots; [s, heads, d] each -> [s, heads, d]."""

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention over all slots of an image; [s, heads, d] each -> [s, heads, d]."""

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        """Returns the inputs [n, hidden] of the decoder: rows of ``table`` [V, hidden] or of ``arena``, selected as
        ``StepInputs`` describes; indices are int32.
        """

    def gather_rows(self, source: Tensor, rows: Tensor) -> Tensor:
        """Returns ``source[rows]``; rows are int64 [r]."""

    def interpolate(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns [s, width]: the sum over j of ``table[rows[:, j]] * weights[:, j]``, computed in float32 and
        rounded once.
        """

    def scatter_rows(self, target: Tensor, rows: Tensor, values: Tensor) -> None:
        """Sets ``target[rows] = values``; rows are int64 [n], values [n, width]."""

    def sample(self, logits: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        """Samples tokens from logits [r, V] and updates the sampler state."""

    def reset(self, reset: ResetTensors, state: SamplerState) -> None:
        """Replaces the sampler state of r rows."""

    def pool(self, x: Tensor, group: Tensor, head: Tensor | None) -> Tensor:
        """Sums rows of x [r, hidden] by group (int32 [r], from 1; 0: in no sum) in float32.

        Args:
            head: float32 [classes, hidden] by which the sums are multiplied; None: they are returned as they are.

        Returns:
            float32 [r, hidden or classes]: group g in row g - 1. A non-finite value affects its own group only.
        """
        ...

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        """Runs one layer of a stack: ``run(*args)``.

        A device whose tensors hold no values may reuse the result of an equal layer.
        """

    def first_residual(self, x: Tensor) -> Tensor | None:
        """Returns the residual stream before the first layer of a stack: None, or zeros if one compiled layer is
        used for all.
        """

    def region(self, run: Callable[..., T], *args: Any) -> T:
        """Runs ``run(*args)``, code outside the layers whose compilation buckets may share.

        ``args`` hold every tensor that it reads except weights.
        """
        ...

    def by_rows(self, run: Callable[..., None], rows: tuple[Any, ...], *shared: Any) -> None:
        """Runs ``run(*rows, *shared)``, a region that stores the results of each row.

        The device may split it into pieces and may compute a row twice.
        """

    def by_pieces(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns ``run(x)``, [n, width] -> [n, out], which treats each row separately and uses no collectives.

        The device may split it into pieces.
        """

    def cut(self, kind: str) -> None:
        """Marks a position at which a device may cut the graph: ``layer`` or ``collective``."""


Body = Callable[[Any], Any]
"""The body of a program: takes the tensors of its stage; reads weights, KV cache, arena and sampler state as
attributes.
"""


class Program(Protocol):
    """One bucket on one device: PLANNED -> COMPILED -> CAPTURED. It owns its input buffers and outputs."""

    bucket: Bucket
    state: ProgramState
    bytes: int

    def compile(self) -> None:
        """Compiles everything that a first run would compile, with as little computation as possible: PLANNED ->
        COMPILED.
        """
        ...

    def rehearse(self) -> None:
        """Runs one launch on the current contents of the buffers, with the memory use and compilations of a real one.

        The device may skip the computation of values.
        """
        ...

    def run(self) -> Any: ...

    def capture(self) -> None:
        """Captures the program as a graph: COMPILED -> CAPTURED, or still COMPILED if the device has no graphs.

        Raises OutOfDeviceMemory if memory runs out.
        """
        ...

    def replay(self) -> Any: ...

    def release(self) -> int:
        """Frees the graph, CAPTURED -> COMPILED; returns the number of bytes freed."""
        ...


Inputs = StepInputs | VisionInputs | HeadInputs | ResetInputs | PoolInputs


class Memory(Protocol):
    """A device's memory in bytes."""

    def total(self) -> int: ...

    def free(self) -> int: ...

    def real_kv_bytes(self) -> int | None:
        """Returns the bytes of KV cache that a simulated card can really hold; None: all of it."""
        ...


@dataclass(frozen=True)
class BackendConfig:
    """The model and the limits that a backend is created for. Heads are counted over the whole model; 0: unknown.

    ``windows``: the distinct sliding windows of the model's layers; 0 stands for full attention. ``upto``: text
    launches have ``Attn.upto``, because tokens of this model may attend to later positions. ``sinks``: layers call
    ``Ops.attend`` with sinks.

    ``full_kv_heads``, ``full_head_dim``: those of layers with full attention, where they differ from other layers'; 0:
    all layers are alike.

    ``recurrent``: text launches have ``TextTensors.recurrent``, because layers keep a state for each sequence.

    ``host_layers``: how many of the last layers have their weights in host memory; ``host_buffer``: bytes of each of
    the two device buffers that they are copied to. ``packed``: the file that keeps packed weights between starts.
    ``kernel_trial``: the folder that keeps which kernels were measured to be fastest; None: nothing is measured.

    With several ranks, all create their backends at the same time and connect at ``rendezvous``. ``world`` ranks share
    the layers of a stage; there are ``stages`` of them. ``index``: the card of this machine's first of ``local_world``.
    """

    dtype: torch.dtype = torch.float32
    block_size: int = 16
    max_tokens: int = 8192
    max_rows: int = 256
    max_blocks_per_row: int = 2048
    vocab_size: int = 0
    rank: int = 0
    world: int = 1
    stage: int = 0
    stages: int = 1
    rendezvous: str = ""
    index: int = 0
    local_rank: int | None = None  # None: all ranks are on one machine
    local_world: int | None = None
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    full_kv_heads: int = 0
    full_head_dim: int = 0
    vision_head_dim: int = 0
    windows: tuple[int, ...] = (0,)
    upto: bool = False
    recurrent: bool = False
    sinks: bool = False
    batch_invariant: bool = False
    host_layers: int = 0
    host_buffer: int = 0
    packed: PackedFile | None = None
    kernel_trial: Path | None = None
    options: Mapping[str, str] | None = None

    @property
    def head_forms(self) -> tuple[tuple[int, int], ...]:
        """(KV heads of the whole model, size of a head) of each kind of layer, those with full attention first."""
        own = (self.kv_heads, self.head_dim)
        return ((self.full_kv_heads, self.full_head_dim), own) if self.full_head_dim else (own,)

    @property
    def number(self) -> int:
        """Global rank: the number of this rank among those of all stages."""
        return self.stage * self.world + self.rank

    @property
    def ranks(self) -> int:
        """Number of ranks of all stages together."""
        return self.stages * self.world

    @property
    def card(self) -> int:
        """Index of this rank's card on its machine."""
        return self.index + (self.number if self.local_rank is None else self.local_rank)

    @property
    def cards(self) -> int:
        """Number of cards of this machine that the group uses."""
        return self.ranks if self.local_world is None else self.local_world


class Backend(Protocol):
    """A device, created by ``make_backend(cfg)`` of its package."""

    name: str
    label: str
    values: bool  # False: tensors have shapes but no values, and weights need none
    device: torch.device
    dtype: torch.dtype  # of weights, activations, KV cache and arena
    ops: Ops
    memory: Memory
    comm: Comm
    policy: Policy
    notes: tuple[str, ...]  # lines to print at start-up
    slot: SlotForm  # of VISION launches; a multimodal model sets it before programs are made

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        """Returns how many of ``wanted`` KV blocks are allocated; a simulated card only accounts for the others."""
        ...

    def compilations(self) -> int:
        """Returns the number of recipes or kernels compiled so far; constant while shapes repeat."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of zeros that lives as long as the engine; if possible, pages are allocated on first
        write.
        """
        ...

    def program(self, bucket: Bucket, body: nn.Module | Body) -> Program: ...

    def fill(self, program: Program, inputs: Inputs) -> None:
        """Copies host arrays into the program's static tensors and fills the rest with padding that has no effect."""
        ...

    @overload
    def fetch(self, out: HeadTensorsOut, rows: int) -> Pending[HeadOutput]: ...
    @overload
    def fetch(self, out: PoolTensorsOut, rows: int) -> Pending[PoolOutput]: ...
    def fetch(self, out: TensorsOut, rows: int) -> Pending[Any]: ...

    def synchronize(self) -> None: ...


def load(name: str) -> Callable[[BackendConfig], Backend]:
    """Returns ``make_backend`` of a built-in backend or of one installed under the entry-point group
    ``trencadis.backends``.

    Its module also has ``pick_dtype(asked, stored) -> torch.dtype`` and ``pick_policy(name) -> Policy``. Raises
    StartupError if there is no such backend.
    """
    if name in BUILT:
        make: Callable[[BackendConfig], Backend] = import_module(TABLE[name]).make_backend
        return make
    offered = find_installed_backend(name)
    if offered is not None:
        import_backend(offered)
        loaded: Callable[[BackendConfig], Backend] = offered.load()
        return loaded
    if name in TABLE:
        raise StartupError(f"the {name} backend is not built; available: {', '.join(list_devices())} (--device cpu)")
    raise StartupError(f"unknown device {name!r}; available: {', '.join(list_devices())}")
