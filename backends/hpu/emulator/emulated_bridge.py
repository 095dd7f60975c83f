"""The emulator as a ``Bridge``, and torch's calls for its device type."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import trencadis.backends.hpu.emulator.emulated_recipe_cache as recipe_cache
from trencadis.backends.hpu.collectives import all_reduce, concat_columns, gather_rows, receive, send
from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import RELEASE, profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_copies import QueueEvent
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_hpu_graphs import wrap
from trencadis.backends.hpu.emulator.emulated_recipe_cache import SavedRecipes
from trencadis.backends.hpu.emulator.fused_kernels import BLOCKWISE, Kernels, check_summable
from trencadis.backends.hpu.emulator.injected_faults import parse
from trencadis.backends.hpu.habana_bridge import EmulatedBridge, EmulatorHooks, is_out_of_memory
from trencadis.backends.hpu.shape_policy import TENSOR_CACHE
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import WORLD_SIZE, hccl_bytes
from trencadis.core.errors import StartupError


class EmulatedRuntime:
    """The device on which new tensors are created; a process has one at a time."""

    device: EmulatedDevice | None = None
    library: Library | None = None


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    if EmulatedRuntime.device is None:
        raise RuntimeError("no emulated device is open")
    return EmulatedRuntime.device.dispatch(op, args, kwargs)


def use(device: EmulatedDevice) -> EmulatedDevice:
    """Makes ``device`` the process's card."""
    if EmulatedRuntime.library is None:
        EmulatedRuntime.library = Library("_", "IMPL")  # type: ignore[no-untyped-call]
        EmulatedRuntime.library.fallback(_fallback, "Lazy")  # type: ignore[no-untyped-call]
    EmulatedRuntime.device = device
    return device


PROFILE, KIND, FAULTS, HOST_MEMORY = (
    f"TRENCADIS_HPU_EMULATOR_{n}" for n in ("PROFILE", "KIND", "FAULTS", "HOST_MEMORY")
)
DEFRAGMENTATION = "PT_ENABLE_MEMORY_DEFRAGMENTATION"
HOST_BYTES = 512 << 20
"""Default host memory of KV caches, in bytes."""


def bridge(environ: Mapping[str, str], index: int = 0) -> EmulatedBridge:
    """Creates an emulated card for this process, as the environment describes it."""
    kind = environ.get(KIND, "") or "compute"
    if kind not in ("compute", "meta"):
        raise StartupError(f"{KIND}={kind!r}: compute or meta")
    found = replace(profile(environ.get(PROFILE, "")), moves=environ.get(DEFRAGMENTATION, "") not in ("0", "false"))
    grouped = int(environ.get(WORLD_SIZE) or 1) > 1
    found = replace(found, total=found.total - (hccl_bytes(environ) if grouped else 0))
    card = EmulatedDevice(found, kind == "compute", parse(environ.get(FAULTS, "")))
    card.hccl_memory = card.queue.grouped = grouped
    saved = recipe_cache.read(environ)
    if saved.folder is not None and card.computes:
        card.clock.saved = SavedRecipes(saved, f"{RELEASE} {card.profile.name}")
    cached = environ.get(TENSOR_CACHE, "") != "1"
    return make_bridge(card, environ.get("PT_HPU_LAZY_MODE", "1") != "0", _bytes(environ.get(HOST_MEMORY, "")), cached)


def _bytes(text: str) -> int:
    """Parses ``512MiB``, ``2GiB`` or a plain number of bytes; empty: 512 MiB."""
    found = re.fullmatch(r"(\d+)\s*(MiB|GiB)?", text.strip()) if text else None
    if text and found is None:
        raise StartupError(f"{HOST_MEMORY}={text!r} is no size (such as 512MiB or 536870912)")
    unit = {None: 1, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(found[1]) * unit[found[2]] if found else HOST_BYTES


def make_bridge(
    device: EmulatedDevice, lazy: bool = True, backed: int = HOST_BYTES, cached: bool = True
) -> EmulatedBridge:
    """Builds the bridge of ``device``, which becomes the process's card.

    Args:
        backed: host memory that KV caches may fill, in bytes.
        cached: True if the tensor cache of graphs is on.
    """
    use(device)
    _silence_warning()
    kernels = Kernels(device)
    device.lazy = lazy

    between = Collectives(device)

    return EmulatedBridge(
        label="hpu (emulated)",
        device=torch.device(DEVICE),
        is_lazy=lambda: lazy,
        mark_step=device.cut if lazy else _do_nothing,
        wrap_in_hpu_graph=lambda module: wrap(device, module, disable_tensor_cache=not cached),
        compile=_compiler(device),
        compile_only=device.compiling,
        synchronize=device.queue.wait,
        mem_get_info=lambda: (device.allocator.free, device.allocator.total),
        out_of_memory=is_out_of_memory,
        metric_localcontext=device.clock.metric,
        device_name=lambda: f"{device.profile.name} (emulated)",
        all_reduce=between.all_reduce,
        all_gather=between.all_gather,
        send=between.send,
        receive=between.receive,
        opaque_collectives=lambda: (between.all_reduce, between.all_gather),  # its compiled form is one operation
        collective_backend="gloo",
        fused_sdpa=kernels.sdpa,
        fused_rms_norm=kernels.rms,
        apply_rotary=lambda x, cos, sin: kernels.rotary(x, cos, sin, None, 0, BLOCKWISE),
        sdpa_parts=kernels.parts,
        block_adjustment=kernels.adjustment if device.profile.block_softmax else None,
        cast_to_fp8_v2=kernels.to_fp8,
        cast_from_fp8=kernels.from_fp8,
        fp8_gemm_v2=kernels.fp8_gemm,
        convert_from_uint4=kernels.from_uint4,
        experts=kernels.experts,
        fp8_experts=kernels.fp8_experts,
        fp8_top=device.profile.fp8_top,
        pin=device.transfers.pin,
        event=lambda: QueueEvent(device.queue),
        hooks=_hooks(device, lazy, backed),
    )


class Collectives:
    """Transfers between ranks, over gloo. In lazy mode each is followed by a wait, which ends the recipe; compile mode
    takes none into a graph, so that each splits its layer's.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device

    def all_reduce(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.all_reduce(x)  # type: ignore[no-any-return]
        self._require_memory("all_reduce")
        self.device.rewrite(x, "all_reduce")
        return self._keep_in_graph(self.device.kernel(_all_reduce, x))

    def all_gather(self, x: Tensor, world: int) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.all_gather(x, world)  # type: ignore[no-any-return]
        self._require_memory("all_gather")
        return concat_columns(self._keep_in_graph(self.device.kernel(_all_gather, x, world)), world)

    def send(self, x: Tensor, to: int) -> Tensor:
        self._require_memory("send")
        self.device.prepare_send(x, "send")
        out: Tensor = self.device.kernel(_send, x, to)
        return out

    def receive(self, x: Tensor, source: int) -> Tensor:
        self._require_memory("receive")
        self.device.rewrite(x, "receive")
        out: Tensor = self.device.kernel(_receive, x, source)
        return out

    def _require_memory(self, name: str) -> None:
        """Raises Refused where the card was opened as that of a single rank."""
        if not self.device.hccl_memory:
            raise emulated_errors.no_hccl_memory(name)

    def _keep_in_graph(self, x: Tensor) -> Tensor:
        """Charges the result of a collective to the graph that keeps it, whatever the graph's cache settings are."""
        if self.device.scope is not None:
            self.device.scope.collective += x.numel() * x.dtype.itemsize
            if self.device.lazy or not self.device.computes:  # else the compiled graph is split at the operation
                self.device.cut()
        return x


def _hooks(device: EmulatedDevice, lazy: bool, backed: int) -> EmulatorHooks:
    return EmulatorHooks(
        values=device.computes,
        backed=backed if device.computes else None,
        reserve=device.allocator.reserve,
        launch=nullcontext if lazy else device.launch,
        layer=device.layer,
        run_out=device.faults.next,
        no_sync=nullcontext,
        launched=lambda: device.clock.launched,
    )


def _compiler(device: EmulatedDevice) -> Callable[..., Any]:
    """Returns the card's compile function. The compiler is made when first needed: importing Dynamo takes a second."""
    made: list[Any] = []

    def compile_function(function: Callable[..., Any], fullgraph: bool = True) -> Callable[..., Any]:
        from trencadis.backends.hpu.emulator.emulated_graph_lowering import Compiler

        if not made:
            made.append(Compiler(device))
        found: Callable[..., Any] = made[0].compile(function, fullgraph)
        return found

    return compile_function


def _do_nothing() -> None:
    """Does nothing: ``mark_step`` in compile mode."""


def _silence_warning() -> None:
    """Silences torch's warning that index_reduce is in beta; only the emulator runs that kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1).index_reduce_(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1), "amax")


def _all_reduce(x: Tensor) -> Tensor:
    check_summable(x)
    return x if x.is_meta else all_reduce(x)


def _send(x: Tensor, to: int) -> Tensor:
    return x if x.is_meta else send(x, to)


def _receive(x: Tensor, source: int) -> Tensor:
    return x if x.is_meta else receive(x, source)


def _all_gather(x: Tensor, world: int) -> Tensor:
    return torch.cat([x] * world) if x.is_meta else gather_rows(x, world)
