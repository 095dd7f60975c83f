"""A request as the router sees it: keys of the starts of its prompt, and of its pictures."""

from __future__ import annotations

import sys
from array import array

from trencadis.core.checkpoint.pooling import LAST
from trencadis.core.kv.evictions import SIZE, picture_key
from trencadis.core.kv.prefix import Chain
from trencadis.core.request import Request
from trencadis.server.routing.work import Demand, Key, Picture, Prefix, anchored

UNIT = 128
"""Tokens between two starts of a prompt that are known apart, or a block where that is larger."""


def key_of(data: bytes) -> Key:
    """The key of 8 bytes."""
    return int.from_bytes(data[:SIZE], "little")


def keys_of(data: bytes) -> array[int]:
    """The keys of an eviction log."""
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def demand_of(request: Request, block: int) -> Demand:
    """What a request asks of an engine whose blocks hold ``block`` tokens; 0: not known yet, so that no prefix is."""
    count = len(request.tokens)
    pictures = [
        Picture(
            key_of(picture_key(f"{request.salt}\0{s.digest}" if request.salt else s.digest)),
            s.slots, s.offset + s.length,
        )
        for s in request.spans
    ]  # fmt: skip
    output = request.params.max_tokens or 0
    whole = request.params.prompt_logprobs is not None or request.params.skip_reading_prefix_cache
    if not block or whole or request.pool not in ("", LAST):
        return Demand(count, (), pictures, output)
    chain = Chain(request, block)
    limit = (count - 1) // block
    chain.extend(request.tokens, limit * block)
    unit = max(UNIT // block, 1)
    prefixes = [
        Prefix(key_of(chain.keys[i - 1]), i * block) for i in range(unit, limit + 1, unit) if anchored(i // unit)
    ]
    return Demand(count, prefixes, pictures, output)
