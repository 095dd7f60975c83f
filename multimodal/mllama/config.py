"""Configuration of Mllama's vision tower of two stacks: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.vision_config import WINDOW_SLOTS, SharedMatrix, SlotForm, VisionLaunchParts, VisionRowPart
from trencadis.multimodal.vit.tile_vision_config import CHANNELS, TileVisionConfig
from trencadis.multimodal.vit.vision_language_config import read_square_side
from trencadis.multimodal.vit.vit_config import ViTConfig

TILE_ALIGNMENT = 8
"""The slots of a tile are padded to a multiple of this, with slots whose input is zeros."""

MAX_TILES = 16
DEFAULT_INTERMEDIATE_LAYERS = [3, 7, 15, 23, 30]
"""Default of transformers' configuration class: layers whose outputs are concatenated with the last layer's."""

TileGrid = tuple[int, int]


def supported_aspect_ratios(max_tiles: int) -> tuple[TileGrid, ...]:
    """Returns (rows, columns) of every arrangement of up to ``max_tiles`` tiles, in the order of their ids."""
    numbers = range(1, max_tiles + 1)
    return tuple((r, c) for r in numbers for c in numbers if r * c <= max_tiles)


@dataclass(frozen=True)
class MllamaVisionConfig(TileVisionConfig):
    """Configuration of Mllama's vision tower: layers over all tiles of an image, then gated global layers. ``depth``
    counts both.

    An image always has ``max_num_tiles`` tiles: the slots of unused tiles, and those that pad each tile, are padding
    slots, to which the others attend too. Every slot of every tile that is not padding within its tile has an arena
    row, class tokens included.

    Args:
        max_num_tiles: maximum number of tiles of an image.
        global_layers: number of layers of the second stack.
        intermediate_layers: layers of the first stack whose outputs are part of a row.
        cross_attention_layers: number of decoder layers that attend to rows; kv_heads, key_dim: their number of KV
            heads and the size of a head.
    """

    max_num_tiles: int = 4
    global_layers: int = 8
    intermediate_layers: tuple[int, ...] = ()
    cross_attention_layers: int = 0
    kv_heads: int = 1
    key_dim: int = 0
    first_norm: ClassVar[bool] = True
    last_norm: ClassVar[bool] = True
    attention_out: ClassVar[str] = "self_attn.o_proj"

    @property
    def max_tiles(self) -> int:
        return self.max_num_tiles

    @property
    def rows_per_tile(self) -> int:
        return self.cross_attention_rows

    @property
    def cross_attention_rows(self) -> int:
        return self.max_num_tiles * self.real_slots

    @property
    def padding_slots(self) -> int:
        """Slots that pad a tile to a multiple of ``TILE_ALIGNMENT``."""
        return -self.real_slots % TILE_ALIGNMENT

    @property
    def slots_per_tile(self) -> int:
        """VISION slots of an image: windows of real slots, then windows of padding slots."""
        return align_up(self.max_num_tiles * (self.real_slots + self.padding_slots), WINDOW_SLOTS) + WINDOW_SLOTS

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the parts of a launch: layers of both stacks, what is between them, a row for each slot."""
        kept = ("sum",) if self.intermediate_layers else ()
        gated = ("tile embedding", "gated images") if self.global_layers else ()
        local = ("images", *kept) if self.depth > self.global_layers else ()
        return VisionLaunchParts(("patches", "masks", *local, *gated), (VisionRowPart("projector", slots),))

    @property
    def slot(self) -> SlotForm:
        return SlotForm(
            CHANNELS * self.patch**2, 1, padding_windows=True, cross_attention_rows=self.cross_attention_rows
        )

    @property
    def biases(self) -> tuple[bool, bool]:
        return False, True

    @property
    def position_rows(self) -> int:
        """Rows of the position table and of the tile table after the first stack, together."""
        return len(supported_aspect_ratios(self.max_num_tiles)) * self.max_num_tiles * (self.real_slots + 1)

    @property
    def projector_inputs(self) -> int:
        """Values of a slot that the projector takes as input."""
        return self.hidden * (1 + len(self.intermediate_layers))

    def count_kv_values(self, ranks: int) -> int:
        """Returns the number of values that one arena row holds on one of ``ranks`` devices: keys and values of all
        cross-attention layers.
        """
        heads = -(-self.kv_heads // ranks) if self.kv_heads >= ranks else 1
        return 2 * self.cross_attention_layers * heads * self.key_dim

    def count_weights(self) -> int:
        return super().count_weights() + self.position_rows * self.hidden

    def slot_weights(self) -> float:
        return super().slot_weights() + self.out_hidden * self.count_kv_values(1)

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        yield SharedMatrix("visual.projector", self.out_hidden, self.projector_inputs, self.projector_inputs)

    def matrices(self, ranks: int, unit: int = 1) -> Iterator[SharedMatrix]:
        """Yields the matrices of the layers only: the projector's columns are reordered while loading, so it is not
        shared.
        """
        first, projector = self.depth - self.global_layers, [m.name for m in self.projector_matrices(ranks)]
        for m in super().matrices(ranks, unit):
            if m.name in projector:
                continue
            top, _, rest = m.name.removeprefix(f"{self.layer_prefix}.").partition(".")
            index = int(top)
            yield m if index < first else m._replace(name=f"visual.gated.{index - first}.{rest}")

    def other_weights(self, ranks: int) -> int:
        """Returns the number of weights in tables, norms, gates and the projector.

        It subtracts the biases of the attention outputs, since only the MLPs have biases.
        """
        total = self.position_rows * self.hidden + 2 * self.norm_weights + 2 * self.global_layers
        return total + self.out_hidden * (self.projector_inputs + 1) - self.depth * self.hidden

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        layers = ViTConfig.activations(self, slots, itemsize, ranks, unit)
        leaving = self.projector_inputs + 2 * self.hidden + self.out_hidden + 3 * self.count_kv_values(ranks)
        return slots * itemsize * len(self.intermediate_layers) * self.hidden + max(layers, slots * itemsize * leaving)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns bytes of the intermediate outputs that are kept, and of the copies that gates multiply after
        all-reduces.
        """
        widths = len(self.intermediate_layers) + (self.global_layers if ranks > 1 else 0)
        return slots * itemsize * widths * self.hidden if cached else 0


def read_vision_config(
    c: JsonFields, kind: str, width: int, cross_attention_layers: int, kv_heads: int, key_dim: int
) -> MllamaVisionConfig:
    """Reads a vision_config of ``kind``; ``width``: of the decoder.

    Raises StartupError for settings that are not implemented.
    """
    c.only("model_type", (kind,), kind)
    c.only("num_channels", (CHANNELS,), CHANNELS)
    hidden = c.integer("hidden_size", most=WIDEST, default=1280)
    key = "num_attention_heads" if "num_attention_heads" in c.values else "attention_heads"
    heads = c.integer(key, most=MOST_HEADS, default=16)
    if hidden % heads:
        c.refuse(key, f"it must divide hidden_size, which is {hidden}")
    image, patch = read_square_side(c, "image_size", 448), read_square_side(c, "patch_size", 14)
    if image % patch:
        c.refuse("patch_size", f"it must divide image_size, which is {image}")
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS, default=32)
    gated = c.integer("num_global_layers", most=MOST_LAYERS, default=8)
    taken = (
        c.integers("intermediate_layers_indices", 0, layers - 1) if c.is_given("intermediate_layers_indices") else ()
    )
    if not c.is_given("intermediate_layers_indices"):
        taken = tuple(DEFAULT_INTERMEDIATE_LAYERS)
        if layers <= taken[-1]:
            c.refuse("num_hidden_layers", f"it must be above {taken[-1]}, the last of intermediate_layers_indices")
    tiles = c.integer("max_num_tiles", most=MAX_TILES, default=4)
    listed = [[*one] for one in supported_aspect_ratios(tiles)]
    if c.is_given("supported_aspect_ratios") and c.values["supported_aspect_ratios"] != listed:
        c.refuse("supported_aspect_ratios", f"implemented: every arrangement of up to {tiles} tiles")
    made = MllamaVisionConfig(
        depth=layers + gated,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=5120),
        out_hidden=width,
        image=image,
        patch=patch,
        eps=c.number("norm_eps", 0, 1, 1e-5, above=True),
        activation=activation_of(c, "hidden_act", "gelu"),
        max_num_tiles=tiles,
        global_layers=gated,
        intermediate_layers=tuple(taken),
        cross_attention_layers=cross_attention_layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
    )
    if c.integer("vision_output_dim", most=WIDEST, default=7680) != made.projector_inputs:
        c.refuse("vision_output_dim", f"it must be {made.projector_inputs}, the values of the outputs that are taken")
    return made
