"""The router's view of a request: keys of the prefixes of its prompt, and of its images."""

from __future__ import annotations

import sys
from array import array

from trencadis.core.checkpoint.pooling_config import LAST
from trencadis.core.kv.block_hash import BlockHashChain
from trencadis.core.kv.block_pool import SIZE, image_key
from trencadis.core.request import Request
from trencadis.server.routing.request_cost import Key, RequestCost, RoutedImage, RoutedPrefix, is_indexed_prefix

PREFIX_STEP = 128
"""Tokens between two prefixes of a prompt that have keys; one block, if that is larger."""


def read_key(data: bytes) -> Key:
    """Returns the key in 8 bytes."""
    return int.from_bytes(data[:SIZE], "little")


def read_keys(data: bytes) -> array[int]:
    """Returns the keys of an eviction log."""
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def make_request_cost(request: Request, block: int) -> RequestCost:
    """Computes the routing cost of a request; prefix keys are left out while the block size is unknown (0)."""
    count = len(request.tokens)
    images = [
        RoutedImage(
            read_key(image_key(f"{request.salt}\0{s.digest}" if request.salt else s.digest)),
            s.slots, s.offset + s.length,
        )
        for s in request.spans
    ]  # fmt: skip
    output = request.params.max_tokens or 0
    whole = request.params.prompt_logprobs is not None or request.params.skip_reading_prefix_cache
    if not block or whole or request.pool not in ("", LAST):
        return RequestCost(count, (), images, output)
    chain = BlockHashChain(request, block)
    limit = (count - 1) // block
    chain.extend(request.tokens, limit * block)
    unit = max(PREFIX_STEP // block, 1)
    prefixes = [
        RoutedPrefix(read_key(chain.keys[i - 1]), i * block)
        for i in range(unit, limit + 1, unit)
        if is_indexed_prefix(i // unit)
    ]
    return RequestCost(count, prefixes, images, output)
