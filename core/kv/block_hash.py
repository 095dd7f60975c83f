"""The hash chain over full blocks: equal keys mean equal KV content. Pure Python.

key(i) = sha256(key(i-1), token ids, (digest, offset) of each image in the block, positions if the request has media).
An item of several runs contributes each of its runs in the block: position, length, first row or constant row. The root
key covers cache_salt, adapter (by digest) and rotary table, so that nothing is shared across them. Positions are part
of the key because equal frames at another fps have different positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from hashlib import sha256
from struct import Struct

from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request

ROOT = b"trencadis-kv-1"


class BlockHashChain:
    """Keys of one sequence's blocks, computed as its tokens become known.

    Args:
        request: provides spans, salt, adapter and positions.
        block_size: tokens of a block.
        long: True if keys are rotated by the table for long requests (``TextConfig.long_from``).
    """

    __slots__ = ("_last", "_packed", "_request", "_root", "_size", "at", "keys")

    def __init__(self, request: Request, block_size: int, long: bool = False) -> None:
        self._size, self._packed = block_size, _packer(block_size)
        self._request = request
        root = ROOT + b"-long" if long else ROOT
        adapter = 0 if request.adapter is None else request.adapter.digest
        self._root = sha256(root + f"{adapter}\0{request.salt}".encode()).digest()
        self.keys: list[bytes] = []
        self.at, self._last = 0, self._root
        """Number of blocks that the last computed key covers, and that key."""

    def branch(self) -> BlockHashChain:
        """Returns a copy of the chain that can be extended independently."""
        made = copy(self)
        made.keys = [*self.keys]
        return made

    def continue_from(self, other: BlockHashChain, tokens: Sequence[int], count: int) -> None:
        """Continues after the first ``count`` blocks of another chain over the same tokens, if it has hashed them."""
        if 0 < count <= max(len(other.keys), other.at) + 1:
            self.at, self._last = count, other.key(tokens, count - 1)

    def extend(self, tokens: Sequence[int], known: int) -> list[bytes]:
        """Adds keys until every full block of ``tokens[:known]`` has one; returns all keys."""
        keys = self.keys
        for index in range(len(keys), known // self._size):
            keys.append(self.key(tokens, index))
        return keys

    def key(self, tokens: Sequence[int], index: int) -> bytes:
        """Returns the key of full block ``index`` without storing it, since sequences request each key once, in
        order.
        """
        if index < len(self.keys):
            self.at, self._last = index + 1, self.keys[index]
            return self._last
        if index != self.at:
            self._hash_up_to(tokens, index)
        self._hash_block(tokens)
        return self._last

    def _hash_up_to(self, tokens: Sequence[int], index: int) -> None:
        """Hashes blocks up to (excluding) block ``index``, starting from the last known key."""
        kept = len(self.keys)
        if not kept <= self.at <= index:
            self.at, self._last = kept, self.keys[-1] if kept else self._root
        while self.at < index:
            self._hash_block(tokens)

    def _hash_block(self, tokens: Sequence[int]) -> None:
        """Hashes the next block into the chain."""
        start = self.at * self._size
        digest = sha256(self._last + self._packed(*tokens[start : start + self._size]))
        if self._request.spans:
            digest.update(self._media(start))
        self.at, self._last = self.at + 1, digest.digest()

    def _media(self, start: int) -> bytes:
        """Returns the bytes of everything besides tokens that a block's KV depends on; empty for plain text."""
        end = start + self._size
        parts = [_span_key(s, start, end) for s in self._request.spans if s.offset < end and s.end > start]
        positions = self._block_positions(start)
        return b"".join(parts) + b"|" + positions if parts or positions else b""

    def _block_positions(self, start: int) -> bytes:
        """Returns the block's int32 positions [3, size] as bytes; empty if they equal the token index.

        Inside the prompt they come from the request, after it they are index + delta. Only the values matter, so that a
        block of an answer is found again when the answer has become part of a prompt.
        """
        positions, delta, length = self._request.positions, self._request.delta, len(self._request.tokens)
        if positions is None:
            return b""
        end, stop, width = start + self._size, min(start + self._size, length), 4 * length
        tail = array("i", range(max(start, length) + delta, end + delta)).tobytes()
        rows = [positions[a * width + 4 * start : a * width + 4 * max(start, stop)] + tail for a in range(3)]
        return b"" if rows == [array("i", range(start, end)).tobytes()] * 3 else b"".join(rows)


@cache
def _packer(size: int) -> Callable[..., bytes]:
    """Returns a function that packs ``size`` token ids into bytes; ``array`` takes four times as long."""
    return Struct(f"{size}i").pack


def _span_key(span: MediaSpan, start: int, end: int) -> bytes:
    return _runs_key(span, start, end) if span.runs else f"{span.digest}@{span.offset - start};".encode()


def _runs_key(span: MediaSpan, start: int, end: int) -> bytes:
    """Returns the ``_span_key`` of an item whose tokens form several runs."""
    within = (r for r in span.runs if r.offset < end and r.offset + r.length > start)
    runs = ",".join(f"{r.offset - start}+{r.length}:{r.first}:{r.constant}" for r in within)
    return f"{span.digest}@{runs};".encode()
