"""How many features of a quantised weight are decoded at a time, for products of many rows by a library.

A piece is decoded into a scratch and multiplied at once. Its product runs in waves of programs, one a processor, and a
wave that few programs fill takes as long as a full one: so the size of a piece decides how much of a card idles. The
sizes of a library's programs are known from its kernels' names; which it takes is estimated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

DENSE_TILE = 64
"""Features of a program that decodes a weight."""

LIBRARY_TILES = (128, 256), (128, 128), (64, 128)
"""Rows and features of a program of a library's product: as cuBLAS has them for large products on an H100, and smaller
ones, which it takes where large ones would leave processors without work.
"""

PIECE_PRODUCTS = 1 << 23
"""Multiplications that a processor could do in the 3 us in which the two launches of a piece of a decoded weight begin:
its share of three quarters of the 989 TFLOPS of an H100.
"""


class LibraryPrograms(NamedTuple):
    """Programs of a library's product, and the values of the result that each computes."""

    programs: int
    values: int


def choose_programs(rows: int, features: int, processors: int) -> LibraryPrograms:
    """Returns the programs of a library's product [rows, features]: of the largest tile that gives every processor one,
    or of the smallest.
    """
    made = [LibraryPrograms(-(-rows // m) * -(-features // n), m * n) for m, n in LIBRARY_TILES]
    return next((one for one in made if one.programs >= processors), made[-1])


@lru_cache(4096)
def choose_piece(rows: int, features: int, columns: int, most: int, processors: int) -> int:
    """Returns the features of a piece of at most ``most``: of those whose products by a library take the least time
    over all pieces, their launches included, the largest.

    Args:
        rows: of the activations.
        features, columns: of the weight.
        most: features that the scratch holds.
        processors: of the card.
    """

    def count_products(piece: int) -> int:
        """Multiplications of a processor in the waves of one piece, its idle time included."""
        programs, values = choose_programs(rows, piece, processors)
        return -(-programs // processors) * values * columns + PIECE_PRODUCTS

    def count_all(each: int) -> int:
        whole, rest = divmod(features, each)
        return whole * count_products(each) + (count_products(rest) if rest else 0)

    narrow = LIBRARY_TILES[1][1]
    sizes = range(narrow, min(most, features + narrow - 1) + 1, narrow)
    return min(sizes, key=lambda each: (count_all(each), -each), default=max(most // DENSE_TILE, 1) * DENSE_TILE)
