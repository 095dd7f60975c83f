"""Parts of a decoder's layers that ``TextConfig`` may name: experts, heads by layer, recurrent layers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SigmoidRouting(NamedTuple):
    """A router whose weights of experts are sigmoids; the experts of a token are those of the highest sums of sigmoid
    and stored correction.

    Args:
        scale: factor of the weights.
        groups: groups of equally many experts; only the ``top_groups`` whose two best sums add up to most take part.
    """

    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a decoder's layers: MLPs, a few of which are applied to each token.

    Args:
        count: experts of a layer.
        top: experts per token.
        inner: intermediate size of an expert.
        normalise: if True, the weights of a token's experts are divided by their sum.
        dense: layers that have one MLP of ``TextConfig.intermediate`` columns instead.
        shared: intermediate size of the shared expert, which every token gets; 0: there is none.
        shared_gate: True if the shared expert's output is multiplied by the sigmoid of a score of the token.
        shared_name: part of the names of the shared expert's weights behind ``mlp``.
        bias: True if the router and the experts have biases.
        beside: True if layers have their MLP, too: the sum of both, behind a norm each, is added to the stream. The
            router and the experts read the stream behind norms of their own.
        plain: True if experts, and the shared one, have no gate.
        sigmoid: the router of sigmoids, which is float32; None: weights are a softmax of the scores.
        latent: width of what experts read and put out, between two projections of the layer; 0: the hidden size.
    """

    count: int
    top: int
    inner: int
    normalise: bool
    dense: tuple[int, ...] = ()
    shared: int = 0
    shared_gate: bool = False
    shared_name: str = ".shared_expert"
    bias: bool = False
    beside: bool = False
    plain: bool = False
    sigmoid: SigmoidRouting | None = None
    latent: int = 0

    @property
    def matrices(self) -> int:
        """Number of matrices of an expert."""
        return 2 if self.plain else 3

    def float_values(self, hidden: int) -> int:
        """Returns how many weights of a layer are float32 in any case: those of a router of sigmoids."""
        return self.count * (hidden + 1) if self.sigmoid is not None else 0

    def norm_values(self, hidden: int) -> int:
        """Returns the number of norm weights of a layer's router and experts: of what they read and of both sums."""
        return 4 * hidden if self.beside else 0

    def values(self, hidden: int, ranks: int = 1, only: int = 0) -> int:
        """Returns the number of weights of one layer on one of ``ranks`` devices, with router and projections.

        ``only``: count just that many experts.
        """
        each = self.matrices * (self.latent or hidden) * -(-self.inner // ranks)
        around = hidden * (self.count + 2 * self.latent) + (self.count if self.sigmoid is not None else 0)
        return around + (only or self.count) * each

    def bias_values(self, hidden: int, ranks: int) -> int:
        """Returns the number of biases of one layer's router and experts on one of ``ranks`` devices."""
        return self.count * (1 + 2 * -(-self.inner // ranks) + hidden) if self.bias else 0

    def shared_values(self, hidden: int, columns: int = 0) -> int:
        """Returns the number of weights of a layer's shared expert and its gate.

        ``columns``: those of one device; 0: all.
        """
        return hidden * (self.matrices * (columns or self.shared) + self.shared_gate) if self.shared else 0


class FullHeads(NamedTuple):
    """Heads of the layers with full attention (``TextConfig.full_layers``), where they differ from those with a window.

    Args:
        keys_as_values: True if these layers have no projection of values: values are keys before their norm and
            rotation.
    """

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False


class QueryGrowth(NamedTuple):
    """The query at position p is multiplied by 1 + ``beta`` * log(1 + floor(p / ``length``))."""

    beta: float
    length: int


CHUNK = 64
"""Tokens of a chunk of the gated delta rule. A prompt that is cut at multiples of it has the same bits as the whole."""


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that keep a state of fixed size for each sequence, in place of keys and values.

    In gated DeltaNet, a causal convolution over queries, keys and values is followed by the gated delta rule; in
    Mamba-2, one over values, keys and queries (x, B and C there) by a scan. Other layers are a convolution alone,
    between two projections.

    Args:
        layers: the layers that are recurrent.
        kernel: tokens that an output of the convolution sees; the state keeps the last ``kernel`` - 1 inputs.
        key_heads: heads of queries and keys (groups in Mamba-2); ``key_dim``: their size.
        value_heads: heads of values, a multiple of ``key_heads``; ``value_dim``: their size.
        interleaved: True if the projections are stored as two matrices, interleaved by key head.
        width: channels of a layer that is a convolution alone, whose state has no matrices; 0: it is no such layer.
        scan: True if the layers are Mamba-2.
        conv_bias, projection_bias: True if the convolution, and the projections, of Mamba-2 have biases.
    """

    layers: tuple[int, ...]
    kernel: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    interleaved: bool = False
    width: int = 0
    scan: bool = False
    conv_bias: bool = False
    projection_bias: bool = False

    @property
    def key_width(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def units(self) -> int:
        """Number of parts that ranks can share: key heads, or channels."""
        return self.width or self.key_heads

    @property
    def unit_name(self) -> str:
        """Plural noun for the parts that ``units`` counts, for messages."""
        return "channels" if self.width else "groups of heads" if self.scan else "key heads"

    def channels(self, ranks: int = 1) -> int:
        """Returns the channels of the convolution on one of ``ranks`` devices."""
        return (self.width or 2 * self.key_width + self.value_width) // ranks

    def slot_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """Returns the bytes of one sequence's state in one layer; ``itemsize``: of the engine's dtype.

        The matrices are float32, since errors of 16 bits would add up.
        """
        return (self.kernel - 1) * self.channels(ranks) * itemsize + 4 * self.key_dim * self.value_width // ranks

    def float_values(self, ranks: int) -> int:
        """Returns how many weights of one layer on one of ``ranks`` devices are float32 in any case: the decays."""
        return (3 if self.scan else 2) * (self.value_heads // ranks)

    def values(self, hidden: int, ranks: int = 1) -> int:
        """Returns the number of weights of one layer on the first of ``ranks`` devices, which adds biases to sums."""
        channels = self.channels(ranks)
        if self.width:
            return hidden * 4 * channels + channels * self.kernel
        heads, width = self.value_heads // ranks, self.value_width // ranks
        if self.scan:
            outputs = channels + width + heads
            biases = self.conv_bias * channels + self.projection_bias * (outputs + hidden)
            return hidden * (outputs + width) + channels * self.kernel + 3 * heads + width + biases
        return hidden * (channels + 2 * width + 2 * heads) + channels * self.kernel + 2 * heads + self.value_dim
