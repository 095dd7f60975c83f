"""Blocks of the KV cache: reference counts, the free list and the index of cached contents. Pure Python.

Invariants, checked by ``BlockPool.check``:

| a block is | references | has a key |
|---|---|---|
| in use | >= 1 | maybe |
| idle: free, its content is still cached | 0 | yes |
| spare: free, content worthless | 0 | no |
| untouched: free, never written | 0 | no |

ZERO (0) and SINK (1) are never allocated and never counted.

Records what the caches have evicted, as keys cut to 8 bytes, by which a router tracks the caches of several
engines.

Host memory tier of the block pool: keeps the content of evicted blocks under its key. Recurrent states of preempted
sequences are kept in the same way, in slots of their own.

The hash chain over full blocks: equal keys mean equal KV content. Pure Python.

key(i) = sha256(key(i-1), token ids, (digest, offset) of each image in the block, positions if the request has media).
An item of several runs contributes each of its runs in the block: position, length, first row or constant row. The root
key covers cache_salt, adapter (by digest) and rotary table, so that nothing is shared across them. Positions are part
of the key because equal frames at another fps have different positions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cache
from hashlib import sha256
from struct import Struct

from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request
from trencadis.core.step import BlockMove

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

    def key_within_block(self, tokens: Sequence[int], count: int) -> bytes:
        """Returns a key of the first ``count`` tokens, wherever they end; it differs from those of blocks."""
        full, part = divmod(count, self._size)
        digest = sha256(self.key(tokens, full - 1) if full else self._root)
        digest.update(b"within" + array("i", tokens[count - part : count]).tobytes())
        if self._request.spans:
            digest.update(self._media(count - part))
        return digest.digest()

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


class HostBlockPool:
    """Manages slots [0, size) of host memory, one block or state each; the least recently used is overwritten first.

    ``moves`` lists copies in the order in which they must run, before the launches of the next Step: a block may be
    reused as soon as it is evicted, and a slot as soon as it is read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.moves: list[BlockMove] = []
        self.stored = 0
        self.restored = 0
        self.evictions = 0
        self._free = list(range(size - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    @property
    def used(self) -> int:
        """Number of slots that hold content."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def keep(self, key: bytes, block: int) -> None:
        """Stores the content ``key`` of an evicted block; makes no copy if it is stored already."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if not self._free:
            if not self._slots:
                return  # all slots are being read
            self._free.append(self._slots.popitem(last=False)[1])
            self.evictions += 1
        slot = self._slots[key] = self._free.pop()
        self.moves.append(BlockMove(block, slot, True))
        self.stored += 1

    def pull(self, keys: Sequence[bytes]) -> list[int]:
        """Removes ``keys`` from the pool and returns their slots, so that evictions meanwhile do not overwrite them."""
        return [self._slots.pop(key) for key in keys]

    def restore(self, key: bytes, slot: int, block: int) -> None:
        """Copies a pulled slot to ``block``; the content stays stored as the most recently used."""
        self.moves.append(BlockMove(block, slot, False))
        self._slots[key] = slot
        self.restored += 1

    def discard(self, key: bytes) -> None:
        """Drops the content ``key``, if it is stored."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Returns the copies that the next Step begins with, and clears the list."""
        moves, self.moves = tuple(self.moves), []
        return moves

    def forget(self) -> None:
        """Drops all content. Copies already listed still run, but their results are never read."""
        self._free.extend(self._slots.values())
        self._slots.clear()

    def check(self) -> None:
        """Asserts that every slot is free or holds one content."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.size)), "a slot of host memory is lost"


SIZE = 8
"""Bytes of a key in the log. Keys only guide routing, so that a collision costs time but no correctness."""


def image_key(key: str) -> bytes:
    """Returns the 8-byte key of an image in the arena, from its ``Request.key_of``."""
    return sha256(key.encode()).digest()[:SIZE]


class EvictionLog:
    """Keys of evicted blocks and images, written by ``BlockPool`` and ``EncoderCache`` if the engine is one of
    several.
    """

    def __init__(self) -> None:
        self._blocks = bytearray()
        self._images = bytearray()

    def block(self, key: bytes) -> None:
        """Records the eviction of a KV block."""
        self._blocks += key[:SIZE]

    def image(self, key: str) -> None:
        """Records the eviction of an image from the encoder cache."""
        self._images += image_key(key)

    def take(self) -> tuple[bytes, bytes]:
        """Returns the keys of blocks and of images evicted since the last call, ``SIZE`` bytes each."""
        taken = bytes(self._blocks), bytes(self._images)
        self._blocks.clear()
        self._images.clear()
        return taken


class BlockPool:
    """Allocates blocks [2, 2 + size): spare blocks first (most recent first), then untouched, then idle (oldest first).

    With this order, memory grows only as far as blocks are needed. When an idle block is allocated, its content is
    copied to ``host`` if there is one.
    """

    def __init__(self, size: int, host: HostBlockPool | None = None) -> None:
        self.size = size
        self.host = host
        self._references = [0] * (size + RESERVED_BLOCKS)
        self._key: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._spare: list[int] = []
        self._untouched = RESERVED_BLOCKS
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self.version = 0
        """Grows whenever a block becomes idle or stops being idle; lookups stay valid until then."""
        self.log: EvictionLog | None = None

    @property
    def free(self) -> int:
        """Number of blocks that ``take`` could allocate now."""
        return len(self._spare) + len(self._idle) + self.size + RESERVED_BLOCKS - self._untouched

    @property
    def used(self) -> int:
        """Number of blocks with a reference."""
        return self.size - self.free

    @property
    def cached(self) -> int:
        """Number of blocks in the prefix cache."""
        return len(self._by_key)

    def references(self, block: int) -> int:
        """Returns the number of sequences that hold ``block``."""
        return self._references[block]

    def take(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks with one reference each; returns None and takes nothing if fewer are free."""
        if count > self.free:
            return None
        blocks = [self._next() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _next(self) -> int:
        if self._spare:
            return self._spare.pop()
        if self._untouched < self.size + RESERVED_BLOCKS:
            self._untouched += 1
            return self._untouched - 1
        return self._evict()

    def _evict(self) -> int:
        """Returns the least recently used idle block, after its content is dropped or copied to the host."""
        block, _ = self._idle.popitem(last=False)
        key = self._key.pop(block)
        del self._by_key[key]
        self.evictions += 1
        self.version += 1
        if self.host is not None:
            self.host.keep(key, block)
        elif self.log is not None:
            self.log.block(key)
        return block

    def on_host(self, key: bytes) -> bool:
        """Returns True if host memory holds the content ``key``."""
        return self.host is not None and key in self.host

    def restore(self, keys: Sequence[bytes]) -> list[int]:
        """Allocates a block for each of ``keys``, which only host memory holds, and copies their contents back.

        The same number of blocks must be free.
        """
        assert self.host is not None
        slots, blocks = self.host.pull(keys), self.take(len(keys))
        assert blocks is not None, "fewer blocks are free than come back"
        for key, slot, block in zip(keys, slots, blocks, strict=True):
            self.host.restore(key, slot, block)
            self.publish(block, key)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, which must be in use or idle."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
                self.version += 1
            self._references[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Releases references.

        The last of ``blocks`` becomes the oldest, so that a tail is evicted before its prefix.
        """
        references, keyed, idle, spare = self._references, self._key, self._idle, self._spare
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} was dropped more often than taken"
            references[block] = left
            if left:
                continue
            if block in keyed:
                idle[block] = None
                self.version += 1
            else:
                spare.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Records that ``block`` holds the content ``key``, unless another block is cached for it already."""
        if block not in self._key and self._by_key.setdefault(key, block) == block:
            self._key[block] = key

    def withdraw(self, block: int) -> None:
        """Removes the content of a block in use from the cache and from host memory: its sequence will change it."""
        key = self._key.pop(block)
        del self._by_key[key]
        if self.host is not None:
            self.host.discard(key)

    def find(self, key: bytes) -> int | None:
        """Returns the block that holds the content ``key``; None if it is not cached."""
        return self._by_key.get(key)

    def idle(self, blocks: Iterable[int]) -> int:
        """Returns how many of ``blocks`` are idle, i.e. by how much sharing them reduces ``free``."""
        return sum(self._references[b] == 0 for b in blocks)

    def forget(self) -> None:
        """Empties the prefix cache."""
        self.version += 1
        self._spare.extend(self._idle)
        self._idle.clear()
        self._key.clear()
        self._by_key.clear()
        if self.host is not None:
            self.host.forget()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Asserts the invariants above against the blocks that sequences hold."""
        if self.host is not None:
            self.host.check()
        counts = [0] * len(self._references)
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "references differ from what is held"
        free = [*self._spare, *self._idle]
        assert len(set(free)) == len(free) and not any(counts[b] for b in free), "a free block is in use"
        touched = sum(c > 0 for c in counts) + len(free)
        assert touched == self._untouched - RESERVED_BLOCKS, "a block is lost"
        assert set(self._idle) <= set(self._key) and not set(self._spare) & set(self._key)
        assert all(self._by_key[k] == b for b, k in self._key.items())
