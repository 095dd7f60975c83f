"""The interface between engine and device: protocols, the tensors that cross it, and the lookup of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from trencadis.core.buckets import Bucket, Policy
from trencadis.core.checkpoint.vision_config import SlotForm
from trencadis.core.devices import BUILT, TABLE, find_installed_backend, import_backend, list_devices
from trencadis.core.errors import StartupError
from trencadis.core.launches.communicators import Comm as Comm
from trencadis.core.launches.communicators import Pipe as Pipe
from trencadis.core.launches.launch_tensors import Attn as Attn
from trencadis.core.launches.launch_tensors import HeadTensors as HeadTensors
from trencadis.core.launches.launch_tensors import HeadTensorsOut as HeadTensorsOut
from trencadis.core.launches.launch_tensors import LayerKV as LayerKV
from trencadis.core.launches.launch_tensors import PoolTensors as PoolTensors
from trencadis.core.launches.launch_tensors import PoolTensorsOut as PoolTensorsOut
from trencadis.core.launches.launch_tensors import ResetTensors as ResetTensors
from trencadis.core.launches.launch_tensors import Rotary as Rotary
from trencadis.core.launches.launch_tensors import SamplerState as SamplerState
from trencadis.core.launches.launch_tensors import Segments as Segments
from trencadis.core.launches.launch_tensors import TensorsOut as TensorsOut
from trencadis.core.launches.launch_tensors import TextTensors as TextTensors
from trencadis.core.launches.launch_tensors import VisionTensors as VisionTensors
from trencadis.core.launches.launch_tensors import host_output as host_output
from trencadis.core.launches.launch_tensors import put_slots as put_slots
from trencadis.core.launches.launch_tensors import slots_at as slots_at
from trencadis.core.models.packed_weights import PackedFile
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.step import HeadInputs, HeadOutput, PoolInputs, PoolOutput, ResetInputs, StepInputs, VisionInputs

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ProgramState(IntEnum):
    """The state of a program."""

    PLANNED = 0
    COMPILED = 1
    CAPTURED = 2


class OutOfDeviceMemory(RuntimeError):
    """The device has not enough memory for a program; what it held before stays intact."""


class Pending(Protocol[T_co]):
    """A result that is being fetched to the host."""

    def done(self) -> bool: ...

    def result(self) -> T_co: ...


class Weight(Protocol):
    """A linear layer's weight in the layout of its backend (``Ops.pack_weight``)."""

    out_features: int
    in_features: int


class ExpertWeights(Protocol):
    """The experts of one layer in the layout of their backend (``Ops.pack_experts``); ``inner``: of this rank."""

    count: int
    inner: int


class Ops(Protocol):
    """The functions that a device may replace. Stateless: weights come in, tensors go out; shapes are static.

    n tokens, h query heads, g KV heads, d head size, s vision slots, r rows, V vocabulary. Values have the backend's
    dtype unless another one is named.

    Attributes:
        copies: ``pack_weight`` keeps no view of the weight, whose memory may be used again.
    """

    copies: bool

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight [out, in] and a bias [out]."""

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs a quantised weight [out, in] and a bias [out]; ``linear`` multiplies by its dequantised values.

        Where ``Policy.quantised`` is ``FLOATS8``, the tensors of ``q`` lie on the host.
        """

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        """[n, in] -> [n, out]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum itself), [n, width] each; the sum x [+ residual] is the new residual stream.

        A float32 weight of a 16-bit model multiplies before the norm is rounded.
        """
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum itself), as ``rms_norm``; the norm is (sum - mean) / deviation * weight + bias."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 x inner] -> [n, inner]: silu of the first half times the second half."""

    def act(self, x: Tensor, kind: str) -> Tensor:
        """An activation of [n, width]: ``silu``, ``gelu``, ``gelu_tanh``, ``quick_gelu`` or ``relu``."""

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        """[n, 2 x inner] -> [n, inner]: the activation of the first half times the second half."""

    def pack_experts(self, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> ExpertWeights:
        """Packs gate_up [2 x inner, hidden] and down [hidden, inner] of each expert."""
        ...

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        """Gated MLPs, [n, hidden] -> [n, hidden]: a token's sum over the ``top`` experts of its best scores.

        Args:
            scores: [n, count], the router's; a share is their softmax in float32 over all experts.
            normalise: whether a token's shares are divided by their sum.
            kind: the activation, as for ``act``.
        """
        ...

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        """Factors of int32 positions [axes, n] (vision: [n, axes]), float32 [d / 2] and int64 [d / 2]."""

    def prepare_attn(self, attn: Attn, heads: int, kv: LayerKV) -> Attn:
        """What the attention of all layers shares, made once a launch: masks and the like, or ``attn`` itself.

        ``heads`` are query heads of this rank; ``kv`` is any layer's cache, for its shape and dtype.
        """

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates q [n, h, d] and k [n, g, d], stores k and v [n, g, d] in the cache.

        Returns:
            The rotated q, and what ``attend`` takes as k and v: the launch's own, k rotated. A device whose attention
            reads all keys from the cache may return k and v as they came.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0) -> Tensor:
        """Attention of q [n, h, d] over the paged cache -> [n, h, d]; q, k and v are ``rope_store``'s.

        A token at place p of its row sees the keys up to p, or up to ``attn.upto`` where the launch has that, and where
        there is a ``window`` (static, of a layer) only those from p - window + 1 on. Without one the argument is left
        out, so that a device which never serves a model with windows need not take it.
        """

    def patches(self, pixels: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [s, values] -> pixels * scale + shift, [s, values] of ``dtype``.

        Where ``Policy.aligned`` is above 1, ``scale`` and ``shift`` may be longer: pixels that are not there are 0.
        """

    def prepare_segments(self, seg: Segments) -> Segments:
        """What the attention of all layers of the tower shares, made once a launch, or ``seg`` itself."""

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotates q and k, [s, heads, d] each."""

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Attention inside windows of WINDOW_SLOTS; [s, heads, d] each -> [s, heads, d]."""

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Attention over all slots of an image; [s, heads, d] each -> [s, heads, d]."""

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        """[n, hidden]: rows of ``table`` [V, hidden] or of ``arena``, as ``StepInputs`` says; indices are int32."""

    def gather_rows(self, source: Tensor, rows: Tensor) -> Tensor:
        """``source[rows]``; rows are int64 [r]."""

    def interpolate(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """[s, width]: sum over j of ``table[near[:, j]] * share[:, j]``, in float32, rounded once; j is below count."""

    def scatter_rows(self, target: Tensor, rows: Tensor, values: Tensor) -> None:
        """``target[rows] = values``; rows are int64 [n], values [n, width]."""

    def sample(self, logits: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        """Draws from logits [r, V] and updates the sampler state."""

    def reset(self, reset: ResetTensors, state: SamplerState) -> None:
        """Replaces the sampler state of r slots."""

    def pool(self, x: Tensor, group: Tensor, head: Tensor | None) -> Tensor:
        """Sums rows of x [r, hidden] by group (int32 [r], from 1; 0: in no sum) in float32.

        Args:
            head: float32 [classes, hidden]; the sums are multiplied with it.

        Returns:
            float32 [r, hidden or classes]: group g in row g - 1. A value that is not finite spoils its own group alone.
        """
        ...

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        """``run(*args)``, one layer of a stack; a device without values may reuse the outcome of an equal layer."""

    def first_residual(self, x: Tensor) -> Tensor | None:
        """The residual stream before the first layer of a stack: None, or zeros where one compiled layer serves all."""

    def region(self, run: Callable[..., T], *args: Any) -> T:
        """``run(*args)``, a part beside the layers that buckets may share: ``args`` hold every tensor but weights."""
        ...

    def by_rows(self, run: Callable[..., None], rows: tuple[Any, ...], *shared: Any) -> None:
        """``run(*rows, *shared)``, a region that stores what each row gives; it may run in pieces, and a row twice."""

    def by_pieces(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``run(x)``, [n, width] -> [n, out], each row by itself and without collectives; it may run in pieces."""

    def cut(self, kind: str) -> None:
        """Marks a place where a device may cut the graph: ``layer`` or ``collective``."""


Body = Callable[[Any], Any]
"""A program's body: takes the stage's tensors, and reads weights, KV cache, arena and state as attributes."""


class Program(Protocol):
    """One bucket on one device: PLANNED -> COMPILED -> CAPTURED. It owns its input buffers and outputs."""

    bucket: Bucket
    state: ProgramState
    bytes: int

    def compile(self) -> None:
        """PLANNED -> COMPILED: compiles what a first run would compile, with as little computing as possible."""
        ...

    def rehearse(self) -> None:
        """Runs one launch on what the buffers hold: memory and compilations of a real one; values may be skipped."""
        ...

    def run(self) -> Any: ...

    def capture(self) -> None:
        """COMPILED -> CAPTURED, or still COMPILED if the device has no graphs; raises if memory runs out."""
        ...

    def replay(self) -> Any: ...

    def release(self) -> int:
        """CAPTURED -> COMPILED; returns the bytes that came back."""
        ...


Inputs = StepInputs | VisionInputs | HeadInputs | ResetInputs | PoolInputs


class Memory(Protocol):
    """A device's memory in bytes."""

    def total(self) -> int: ...

    def free(self) -> int: ...

    def real_kv_bytes(self) -> int | None:
        """Bytes of KV cache that an imitated card can really hold; None: all of it."""
        ...


@dataclass(frozen=True)
class BackendConfig:
    """The model and limits that a backend is made for. Heads are those of the whole model; 0: not known.

    ``windows``: of the model's layers, each once, 0 where a layer sees all keys. ``upto``: text launches have
    ``Attn.upto``, because a token of this model may see keys behind its own place.

    ``host_layers``: of the model's last layers, whose weights lie in host memory; ``host_buffer``: bytes of each of the
    two buffers that they arrive in. ``packed``: where packed weights are kept between starts.

    With several ranks, all of them make their backends together: they meet at ``rendezvous``
    (core/executor/process_groups.py). ``world`` ranks share the layers of a stage; there are ``stages`` of them.
    ``index`` is the card of the first of the ``local_world`` ranks of this machine.
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
    vision_head_dim: int = 0
    windows: tuple[int, ...] = (0,)
    upto: bool = False
    batch_invariant: bool = False
    host_layers: int = 0
    host_buffer: int = 0
    packed: PackedFile | None = None
    options: Mapping[str, str] | None = None

    @property
    def number(self) -> int:
        """This rank's number among those of all stages."""
        return self.stage * self.world + self.rank

    @property
    def ranks(self) -> int:
        """The ranks of all stages."""
        return self.stages * self.world

    @property
    def card(self) -> int:
        """The number of this rank's card on its machine."""
        return self.index + (self.number if self.local_rank is None else self.local_rank)

    @property
    def cards(self) -> int:
        """How many cards of its machine the group has."""
        return self.ranks if self.local_world is None else self.local_world


class Backend(Protocol):
    """A device, made by ``make_backend(cfg)`` of its package."""

    name: str
    label: str
    values: bool  # False: tensors have shapes but no values, and weights need none
    device: torch.device
    dtype: torch.dtype  # of weights, activations, KV cache and arena
    ops: Ops
    memory: Memory
    comm: Comm
    policy: Policy
    notes: tuple[str, ...]  # lines to show at start-up
    slot: SlotForm  # of VISION launches; a multimodal model sets it before programs are made

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        """How many of ``wanted`` KV blocks are allocated; an imitated card only accounts for the others."""
        ...

    def compilations(self) -> int:
        """Recipes or kernels compiled so far; constant while shapes repeat."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor [shape] of zeros that lives as long as the engine; if possible, memory is taken as it is written."""
        ...

    def program(self, bucket: Bucket, body: nn.Module | Body) -> Program: ...

    def fill(self, program: Program, inputs: Inputs) -> None:
        """Copies host arrays into the program's static tensors and fills the rest with inert padding."""
        ...

    @overload
    def fetch(self, out: HeadTensorsOut, rows: int) -> Pending[HeadOutput]: ...
    @overload
    def fetch(self, out: PoolTensorsOut, rows: int) -> Pending[PoolOutput]: ...
    def fetch(self, out: TensorsOut, rows: int) -> Pending[Any]: ...

    def synchronize(self) -> None: ...


def load(name: str) -> Callable[[BackendConfig], Backend]:
    """``make_backend`` of a built-in backend or of one found by the entry-point group ``trencadis.backends``.

    Its module also has ``pick_dtype(asked, stored) -> torch.dtype`` and ``pick_policy(name) -> Policy``.
    Raises StartupError where there is no such backend.
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
