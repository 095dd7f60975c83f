"""The tower of two stacks as the engine's plans see it: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.decoder_fields import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.checkpoint.vision_config import SharedMatrix, SlotForm
from trencadis.core.layout import WINDOW_SLOTS, aligned
from trencadis.multimodal.tiles.config import CHANNELS, TileTower
from trencadis.multimodal.tiles.fields import square
from trencadis.multimodal.vit import ViTConfig

UNIT = 8
"""The slots of a tile are filled to a multiple of it, with slots that begin as zeros."""

MOST_TILES = 16
TAKEN = [3, 7, 15, 23, 30]
"""The configuration class's layers whose outputs stand beside the last one's."""

Grid = tuple[int, int]


def grids(most: int) -> tuple[Grid, ...]:
    """(rows, columns) of every arrangement of up to ``most`` tiles, in the order that numbers them."""
    numbers = range(1, most + 1)
    return tuple((r, c) for r in numbers for c in numbers if r * c <= most)


@dataclass(frozen=True)
class TwoStackTower(TileTower):
    """Layers over all tiles of a picture at once, and behind them gated ones. ``depth``: of both.

    A picture has ``tiles`` tiles, whatever it fills of them: its empty tiles and the slots that fill a tile up are
    ghosts, which the others see. Rows are those of the slots of all tiles, class tokens included.

    Args:
        tiles: most tiles of a picture.
        gated: layers of the second stack.
        taken: layers of the first stack whose outputs are part of a row.
        seers: layers of the decoder that attend to rows; kv_heads, key_dim: their KV heads and the size of those.
    """

    tiles: int = 4
    gated: int = 8
    taken: tuple[int, ...] = ()
    seers: int = 0
    kv_heads: int = 1
    key_dim: int = 0
    first_norm: ClassVar[bool] = True
    last_norm: ClassVar[bool] = True
    out: ClassVar[str] = "self_attn.o_proj"

    @property
    def most_tiles(self) -> int:
        return self.tiles

    @property
    def tokens(self) -> int:
        return self.unit

    @property
    def unit(self) -> int:
        return self.tiles * self.real

    @property
    def spare(self) -> int:
        """Slots that fill a tile up."""
        return -self.real % UNIT

    @property
    def tile(self) -> int:
        """VISION slots of a picture: windows of real slots, then windows of ghosts."""
        return aligned(self.tiles * (self.real + self.spare), WINDOW_SLOTS) + WINDOW_SLOTS

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, 1, ghosts=True, unit=self.unit)

    @property
    def biases(self) -> tuple[bool, bool]:
        return False, True

    @property
    def places_held(self) -> int:
        """Rows of the table of places, and of the one behind the first stack."""
        return len(grids(self.tiles)) * self.tiles * (self.real + 1)

    @property
    def wide(self) -> int:
        """Values of a slot that the projector reads."""
        return self.hidden * (1 + len(self.taken))

    def kept(self, ranks: int) -> int:
        """Values of an arena row on one of ``ranks`` devices."""
        heads = -(-self.kv_heads // ranks) if self.kv_heads >= ranks else 1
        return 2 * self.seers * heads * self.key_dim

    def stored(self) -> int:
        return super().stored() + self.places_held * self.hidden

    def slot_weights(self) -> float:
        return super().slot_weights() + self.out_hidden * self.kept(1)

    def exit_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        yield SharedMatrix("visual.projector", self.out_hidden, self.wide, self.wide)

    def matrices(self, ranks: int, unit: int = 1) -> Iterator[SharedMatrix]:
        """Those of the layers: the projector's columns change their order as it is loaded."""
        first, projector = self.depth - self.gated, [m.name for m in self.exit_matrices(ranks)]
        for m in super().matrices(ranks, unit):
            if m.name in projector:
                continue
            top, _, rest = m.name.removeprefix(f"{self.layers_at}.").partition(".")
            place = int(top)
            yield m if place < first else m._replace(name=f"visual.gated.{place - first}.{rest}")

    def beside(self, ranks: int) -> int:
        """Tables, norms, gates and the projector; the attention's output has no bias, other than the MLP's."""
        total = self.places_held * self.hidden + 2 * self.norm + 2 * self.gated
        return total + self.out_hidden * (self.wide + 1) - self.depth * self.hidden

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        layers = ViTConfig.activations(self, slots, itemsize, ranks, unit)
        leaving = self.wide + 2 * self.hidden + self.out_hidden + 3 * self.kept(ranks)
        return slots * itemsize * len(self.taken) * self.hidden + max(layers, slots * itemsize * leaving)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """The outputs that are taken between, and what gates multiply behind sums of ranks."""
        widths = len(self.taken) + (self.gated if ranks > 1 else 0)
        return slots * itemsize * widths * self.hidden if cached else 0


def tower_of(c: Fields, kind: str, width: int, seers: int, kv_heads: int, key_dim: int) -> TwoStackTower:
    """Of a vision_config of ``kind``; ``width``: the decoder's. Raises StartupError for what is not implemented."""
    c.only("model_type", (kind,), kind)
    c.only("num_channels", (CHANNELS,), CHANNELS)
    hidden = c.integer("hidden_size", most=WIDEST, default=1280)
    key = "num_attention_heads" if "num_attention_heads" in c.values else "attention_heads"
    heads = c.integer(key, most=MOST_HEADS, default=16)
    if hidden % heads:
        c.refuse(key, f"it must divide hidden_size, which is {hidden}")
    image, patch = square(c, "image_size", 448), square(c, "patch_size", 14)
    if image % patch:
        c.refuse("patch_size", f"it must divide image_size, which is {image}")
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS, default=32)
    gated = c.integer("num_global_layers", most=MOST_LAYERS, default=8)
    taken = c.integers("intermediate_layers_indices", 0, layers - 1) if c.given("intermediate_layers_indices") else ()
    if not c.given("intermediate_layers_indices"):
        taken = tuple(TAKEN)
        if layers <= taken[-1]:
            c.refuse("num_hidden_layers", f"it must be above {taken[-1]}, the last of intermediate_layers_indices")
    tiles = c.integer("max_num_tiles", most=MOST_TILES, default=4)
    listed = [[*one] for one in grids(tiles)]
    if c.given("supported_aspect_ratios") and c.values["supported_aspect_ratios"] != listed:
        c.refuse("supported_aspect_ratios", f"implemented: every arrangement of up to {tiles} tiles")
    made = TwoStackTower(
        depth=layers + gated,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=5120),
        out_hidden=width,
        image=image,
        patch=patch,
        eps=c.number("norm_eps", 0, 1, 1e-5, above=True),
        activation=activation_of(c, "hidden_act", "gelu"),
        tiles=tiles,
        gated=gated,
        taken=tuple(taken),
        seers=seers,
        kv_heads=kv_heads,
        key_dim=key_dim,
    )
    if c.integer("vision_output_dim", most=WIDEST, default=7680) != made.wide:
        c.refuse("vision_output_dim", f"it must be {made.wide}, the values of the outputs that are taken")
    return made
