"""Mixture of experts in place of an MLP: a router, and MLPs whose columns are divided over the ranks.

Some models have a shared expert, too: an MLP for every token, multiplied by a gate or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig, SigmoidRouting
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource, take_float, take_values
from trencadis.core.device.backend import AdapterRows, Backend, Comm, ExpertBiases, ExpertWeights, Ops
from trencadis.core.models.linear_and_embedding import Linear, Matrix, merge_or_separate, pad_rows, span
from trencadis.core.models.mlp_and_norms import MLP, GatedMLP, PlainMLP, RMSNorm
from trencadis.core.quant.quantised_tensor import QTensor


class CodedExperts(ExpertWeights, Protocol):
    """Experts of which some are kept as quantised codes; ``nbytes`` counts all of them."""

    nbytes: int


class CodingOps(Protocol):
    """Additional method of ``Ops`` that keep experts as codes; other ops get them dequantised to the engine's dtype."""

    def pack_quantised_experts(
        self, gate_up: Sequence[Matrix], down: Sequence[Matrix], biases: ExpertBiases | None = None
    ) -> CodedExperts | None:
        """Packs experts like ``pack_experts``; any of the matrices may be quantised.

        Returns None if the device cannot keep these codes: then the experts are dequantised.
        """
        ...


class SharedExpert:
    """The expert that every token gets; its output may be multiplied by the sigmoid of a score of the token."""

    def __init__(
        self, ops: Ops, comm: Comm, width: int, c: ExpertsConfig, group: int = 1, act: str = "silu", aligned: int = 1
    ) -> None:
        self.width, self.name = width, c.shared_name
        kind = PlainMLP if c.plain else GatedMLP
        self.mlp: MLP = kind(ops, comm, width, c.shared, group=group, act=act, aligned=aligned)
        self.gate = Linear(ops, comm) if c.shared_gate else None

    def load(self, source: WeightSource, name: str) -> None:
        self.mlp.load(source, f"{name}{self.name}")
        if self.gate is not None:
            self.gate.pack(source.take(f"{name}.shared_expert_gate.weight", (1, self.width)), None)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes this rank's part of the sum: [n, width] -> [n, width]."""
        y = self.mlp.rank_part(x)
        return y if self.gate is None else y * torch.sigmoid(self.gate(x))

    def nbytes(self) -> int:
        return self.mlp.nbytes() + (self.gate.bytes if self.gate is not None else 0)


class SigmoidRouter:
    """A router of ``SigmoidRouting``, float32 on every device, since choices follow from small differences."""

    weight: Tensor  # float32 [count, width]
    correction: Tensor  # float32 [count]

    def __init__(self, c: ExpertsConfig, routing: SigmoidRouting) -> None:
        self.count, self.top, self.normalise, self.routing = c.count, c.top, c.normalise, routing

    def load(self, source: WeightSource, name: str, width: int) -> None:
        self.weight = take_float(source, f"{name}.weight", (self.count, width))
        self.correction = take_float(source, f"{name}.e_score_correction_bias", (self.count,))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (scores float32 [n, count], factor float32 [n, 1]) of tokens x [n, width].

        The softmax of the scores has each expert's share of the sum of those that the token takes, and zero elsewhere;
        its weight is that share times the factor.
        """
        logits = functional.linear(x.float(), self.weight)
        weights = logits.sigmoid()
        taken = self._mark_taken(weights + self.correction)
        scores = torch.where(taken, functional.logsigmoid(logits), UNTAKEN)
        if self.normalise:
            return scores, torch.full_like(scores[:, :1], self.routing.scale)
        return scores, torch.where(taken, weights, 0.0).sum(-1, keepdim=True) * self.routing.scale

    def _mark_taken(self, choice: Tensor) -> Tensor:
        """Returns bool [n, count]: the best experts of each token, within its best groups."""
        r = self.routing
        if r.top_groups < r.groups:
            grouped = choice.view(len(choice), r.groups, -1)
            inside = mark_best(grouped.topk(2, dim=-1).values.sum(-1), r.top_groups)
            choice = torch.where(inside[:, :, None], grouped, UNTAKEN).view(choice.shape)
        return mark_best(choice, self.top)

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + self.correction.nbytes


def mark_best(scores: Tensor, count: int) -> Tensor:
    """Returns bool [n, all]: True at the ``count`` best ``scores`` [n, all], of equal ones the lowest places; NaN is
    above any number.

    Not a stable sort, which not every device has: ``topk`` gives the least score that is taken, whichever ones it took.
    """
    scores = torch.where(scores.isnan(), torch.inf, scores)
    least = scores.topk(count, dim=-1).values[:, -1:]
    better, equal = scores > least, scores == least
    left = count - better.sum(-1, keepdim=True, dtype=torch.int32)
    return better | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))


UNTAKEN = -1e30
"""Score of an expert that a token does not take: finite in bfloat16, too, and zero behind a softmax."""


class ExpertMLP:
    """The MoE layer: every rank computes the same routing and holds a share of each expert, zero-padded if uneven."""

    weights: ExpertWeights

    def __init__(
        self, ops: Ops, comm: Comm, width: int, c: ExpertsConfig, act: str = "silu",
        device: torch.device | None = None, group: int = 1, aligned: int = 1,
    ) -> None:  # fmt: skip
        self.ops, self.comm, self.width, self.act = ops, comm, width, act
        self.device = device or torch.device("cpu")
        self.count, self.top, self.inner, self.normalise = c.count, c.top, c.inner, c.normalise
        self.biased, self.beside = c.bias, c.beside
        self.parts = ("up_proj",) if c.plain else GATED
        self.router = Linear(ops, comm)
        self.sigmoid = None if c.sigmoid is None else SigmoidRouter(c, c.sigmoid)
        self.expert_width = c.latent or width
        self.narrow, self.widen = (Linear(ops, comm) if c.latent else None for _ in range(2))
        self.shared = SharedExpert(ops, comm, width, c, group, act, aligned) if c.shared else None
        self.bytes = 0

    def load(self, source: WeightSource, name: str) -> None:
        if self.sigmoid is None:
            self._load_router(source, f"{name}.gate")
        else:
            self.sigmoid.load(source, f"{name}.gate", self.width)
        if self.narrow is not None and self.widen is not None:
            shape = self.expert_width, self.width
            self.narrow.pack(take_values(source, f"{name}.fc1_latent_proj", shape, self.device), None)
            self.widen.pack(take_values(source, f"{name}.fc2_latent_proj", shape[::-1], self.device), None)
        if self.shared is not None:
            self.shared.load(source, name)
        biases = (self._biases(source, f"{name}.experts"),) if self.biased else ()
        self.bytes = sum(one.nbytes for found in biases for some in found for one in some)
        each = [self._expert(source, f"{name}.experts.{i}") for i in range(self.count)]
        gate_up, down = [one for one, _ in each], [one for _, one in each]
        if self.beside:  # a factor of an expert's weight is one of its outputs
            factors = source.take(f"{name}.per_expert_scale", (self.count,)).unbind()
            down = [scale_matrix(one, factor) for one, factor in zip(down, factors, strict=True)]
        if any(isinstance(one, QTensor) for one in (*gate_up, *down)) and hasattr(self.ops, "pack_quantised_experts"):
            coded = cast(CodingOps, self.ops).pack_quantised_experts(gate_up, down, *biases)
            if coded is not None:
                self.weights, self.bytes = coded, self.bytes + coded.nbytes
                return
        plain = [self._plain(some) for some in (gate_up, down)]
        self.bytes += sum(one.nbytes for some in plain for one in some)
        self.weights = self.ops.pack_experts(plain[0], plain[1], *biases)

    def _plain(self, some: list[Matrix]) -> list[Tensor]:
        """Converts matrices to the engine's dtype, releasing quantised ones one by one to limit the peak memory."""
        for i, one in enumerate(some):
            some[i] = one if isinstance(one, Tensor) else one.values().to(self.device)
        return [one for one in some if isinstance(one, Tensor)]

    def _load_router(self, source: WeightSource, name: str) -> None:
        """Loads the router in the engine's dtype even if it is stored quantised, since expert weights follow from
        its scores.
        """
        bias = source.take(f"{name}.bias", (self.count,)) if self.biased else None
        self.router.pack(take_values(source, name, (self.count, self.width), self.device), bias)

    def _expert(self, source: WeightSource, name: str) -> tuple[Matrix, Matrix]:
        """Returns this rank's gate_up [2 x share, width], or [share, width] without gates, and down [width, share]."""
        start, stop, share = span(self.inner, self.comm.rank, self.comm.world)
        parts = merge_or_separate([self._part(source, f"{name}.{part}", 0, start, stop, share) for part in self.parts])
        if len(parts) > 1:  # codes that cannot be joined to one matrix
            parts = [torch.cat(self._plain(parts))]
        return parts[0], self._part(source, f"{name}.down_proj", 1, start, stop, share)

    def _biases(self, source: WeightSource, name: str) -> ExpertBiases:
        """Returns this rank's biases; those of the outputs are zeros on all ranks but the first."""
        start, stop, share = span(self.inner, self.comm.rank, self.comm.world)
        gate_up, down = [], []
        for i in range(self.count):
            own = [source.shard(f"{name}.{i}.{part}.bias", (self.inner,), 0, start, stop) for part in GATED]
            gate_up.append(torch.cat([pad_rows(one, share) for one in own]))
            out = source.take(f"{name}.{i}.down_proj.bias", (self.width,))
            down.append(out if self.comm.rank == 0 else torch.zeros_like(out))
        return ExpertBiases(gate_up, down)

    def _part(self, source: WeightSource, name: str, dim: int, start: int, stop: int, share: int) -> Matrix:
        """Returns a rank's share of a matrix: [share, width] if ``dim`` is 0, else [width, share]."""
        width = self.expert_width
        shape = (self.inner, width) if dim == 0 else (width, self.inner)
        found = source.take_quantised(name, shape, dim, start, stop)
        if found is not None:
            return found.padded(share, width) if dim == 0 else found.padded(width, share)
        weight = source.shard(f"{name}.weight", shape, dim, start, stop)
        return pad_rows(weight, share) if dim == 0 else functional.pad(weight, (0, share - (stop - start)))

    def __call__(self, x: Tensor, rows: AdapterRows | None = None, routed: Tensor | None = None) -> Tensor:
        """Computes [n, width] -> [n, width] in the backend's dtype, summed over ranks; experts have no adapters.

        ``routed``: the router's input, [n, width]; None: x.
        """
        y = self._run_experts(x, x if routed is None else routed)
        if self.shared is not None:
            y = y + self.shared(x)
        if self.comm.world == 1:
            return y
        self.ops.cut("collective")
        return self.comm.all_reduce(y)

    def _run_experts(self, x: Tensor, routed: Tensor) -> Tensor:
        """Computes this rank's part of the experts' sum, [n, width], between projections if there are any."""
        inner = x if self.narrow is None else self.narrow(x)
        if self.sigmoid is None:
            y = self.ops.experts(inner, self.router(routed), self.weights, self.top, self.normalise, self.act)
        else:
            scores, factor = self.sigmoid(routed)
            y = self.ops.experts(inner, scores, self.weights, self.top, True, self.act)
            y = (y * factor).to(x.dtype)
        return y if self.widen is None else self.widen(y)

    def nbytes(self) -> int:
        router = self.router.bytes if self.sigmoid is None else self.sigmoid.bytes
        around = sum(one.bytes for one in (self.narrow, self.widen) if one is not None)
        return router + around + self.bytes + (self.shared.nbytes() if self.shared is not None else 0)


def scale_matrix(x: Matrix, factor: Tensor) -> Matrix:
    """Returns a matrix multiplied by ``factor``, one number; a quantised matrix keeps its codes."""
    if isinstance(x, QTensor):
        return replace(x, scale=x.scale * factor.to(x.scale.device).float())
    return x * factor


class ExpertsBeside:
    """Experts beside a layer's MLP: both outputs have a norm of their own and are added.

    The router reads the residual stream behind a norm whose weight includes a factor of hidden ** -0.5; the experts
    read it behind another norm.
    """

    def __init__(self, backend: Backend, c: TextConfig, experts: ExpertsConfig, group: int, aligned: int) -> None:
        ops = backend.ops
        self.ops = ops
        self.input_norm, self.router_norm, self.mlp_norm, self.out_norm = (
            RMSNorm(ops, c.hidden, c.eps) for _ in range(4)
        )
        self.experts = ExpertMLP(
            ops, backend.comm, c.hidden, experts, c.activation, backend.device, group, aligned
        )  # fmt: skip

    def load(self, source: WeightSource, name: str) -> None:
        self.input_norm.load(source, f"{name}.input_layernorm")
        self.mlp_norm.load(source, f"{name}.mlp_layernorm")
        self.out_norm.load(source, f"{name}.out_layernorm")
        width = self.router_norm.width
        self.router_norm.weight = source.take(f"{name}.scale", (width,)) * width**-0.5
        self.experts.load(source, name)

    def __call__(self, y: Tensor, stream: Tensor) -> Tensor:
        """Returns the sum of the normed output y of the MLP and that of the experts, [n, hidden]."""
        x = self.experts(self.input_norm(stream)[0], routed=self.router_norm(stream)[0])
        return self.mlp_norm(y)[0] + self.out_norm(x)[0]

    def nbytes(self) -> int:
        norms = (self.input_norm, self.router_norm, self.mlp_norm, self.out_norm)
        return sum(norm.nbytes() for norm in norms) + self.experts.nbytes()


GATED = ("gate_proj", "up_proj")
