"""Grammars of this server: written once, test-compiled in a worker process, cached; and the vocabulary that ranks
need.

Makes the vocabulary of grammars from a tokenizer.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from trencadis.core.errors import BadRequest, Unavailable
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary
from trencadis.core.token_masks.grammar_trial import VocabularySkeleton
from trencadis.multimodal.decode_workers.worker_pool import Job, WorkerPool
from trencadis.server.grammars.lark_grammar_and_tool_functions import GrammarWriter
from trencadis.server.text.checkpoint_tokenizer import MARKUP, Tokenizer

LEVEL = 1
"""Compression level: half the bytes of a tokenizer in a third of the time of the default level."""


def find_control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns tokens that text of a grammar never matches: the special ones, and added ones that mark structure."""
    marks = {text: token for text, token in tokenizer.added.items() if MARKUP.fullmatch(text)}
    return {text: token for text, token in (marks | tokenizer.special).items() if text}


def make_vocabulary(tokenizer: Tokenizer, size: int, eos: Collection[int]) -> Vocabulary:
    """Returns the bytes of each of a model's ``size`` ids, and its tokenizer. Takes seconds if large: run it in a
    thread.
    """
    control = set(find_control_tokens(tokenizer).values())
    tokens = [tokenizer.get_token_bytes(i) if i < tokenizer.vocab_size or i in control else b"" for i in range(size)]
    special = sorted({i for i in (*control, *eos) if i < size})
    for token in special:
        # A control token without a name could never be drawn, not even to end a text.
        tokens[token] = tokens[token] or b"<|%d|>" % token
    spelling = zlib.compress(tokenizer.spell_parts(find_control_tokens(tokenizer)).encode(), LEVEL)
    return Vocabulary(tokens, special, sorted(i for i in eos if i < size), spelling)


def make_skeleton(tokenizer: Tokenizer, size: int, eos: Collection[int]) -> VocabularySkeleton:
    """Returns the same without words, for trial compilations."""
    named = {token: text for text, token in find_control_tokens(tokenizer).items() if token < size}
    named |= {token: f"<|{token}|>" for token in eos if token not in named and token < size}
    return VocabularySkeleton(size, named, sorted(i for i in eos if i < size))


WORKERS = 2
SECONDS = 2.0
"""Time limit of one trial compilation."""
MEMORY = 64 << 20
KEPT_BYTES = 32 << 20
"""Maximum bytes of cached grammars."""
IN_LOOP = 16 << 10
"""Maximum bytes of schemas that are read in the event loop; larger ones are read in a thread."""
JOBS = {"grammar": "trencadis.core.token_masks.grammar_trial:try_grammar"}
TOO_COMPLEX = "it is too large or too complex to be compiled"


class GrammarCache:
    """Makes grammars that every rank can compile.

    Args:
        size: number of ids that the model can draw.
        eos: ids that end a choice.
        pool: workers that test-compile grammars; None: two, started at the first grammar.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Collection[int], pool: WorkerPool | None = None) -> None:
        self._tokenizer, self._size, self._eos = tokenizer, size, frozenset(eos)
        self.pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._control: dict[str, int] | None = None
        self._skeleton = ""
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._bytes = 0
        self._running: dict[bytes, asyncio.Future[str]] = {}

    def make_writer(self) -> GrammarWriter:
        """Makes a writer of one grammar for this vocabulary."""
        if self._control is None:
            self._control = find_control_tokens(self._tokenizer)
        return GrammarWriter(self._control)

    async def get_grammar(self, key: bytes, write: Callable[[], str], param: str) -> str:
        """Returns the grammar that ``write`` writes, test-compiled; ``key`` identifies all its inputs.

        Raises:
            BadRequest: it cannot be compiled; ``param`` names the field.
            Unavailable: no worker can be started.
        """
        digest = hashlib.sha256(key).digest()
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        running = self._running.get(digest)
        if running is None:
            running = self._running[digest] = asyncio.ensure_future(self._write_and_try(digest, write, param, len(key)))
            running.add_done_callback(lambda done: self._forget(digest, done))
        # Other requests may wait for the same grammar: one that is cancelled does not end it.
        return await asyncio.shield(running)

    def _forget(self, digest: bytes, done: asyncio.Future[str]) -> None:
        self._running.pop(digest, None)
        if not done.cancelled():
            done.exception()  # marks the error as retrieved, since its caller may have left

    async def _write_and_try(self, digest: bytes, write: Callable[[], str], param: str, size: int) -> str:
        loop = asyncio.get_running_loop()
        try:
            made = write() if size <= IN_LOOP else await loop.run_in_executor(self._thread, write)
        except RecursionError:
            raise BadRequest(f"{param[:60]} makes no grammar: {TOO_COMPLEX}.", param=param) from None
        await self._try(made, param)
        self._known[digest] = made
        self._bytes += len(made)
        while self._bytes > KEPT_BYTES:
            _, old = self._known.popitem(last=False)
            self._bytes -= len(old)
        return made

    async def _try(self, grammar: str, param: str) -> None:
        if self.pool is None:
            self.pool = WorkerPool(WORKERS, jobs=JOBS)
        if not self._skeleton:
            self._skeleton = make_skeleton(self._tokenizer, self._size, self._eos).pack()
        job = Job("grammar", {"skeleton": self._skeleton}, SECONDS, MEMORY, 1 << 16, retry=False)
        try:
            await self.pool.run(job, grammar.encode())
        except Unavailable:
            raise Unavailable("Grammars cannot be compiled at the moment.", retry_after=1) from None
        except BadRequest as error:
            # A worker that died reports no reason of its own.
            why = TOO_COMPLEX if "media" in error.message else error.message
            raise BadRequest(f"{param[:60]} makes no grammar: {why}.", param=param) from None
        except Exception:
            raise BadRequest(f"{param[:60]} makes no grammar: {TOO_COMPLEX}.", param=param) from None

    async def pack_vocabulary(self) -> bytes:
        """Returns the packed vocabulary, which is sent to the engine once; made in a thread, since it takes seconds."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: make_vocabulary(self._tokenizer, self._size, self._eos).pack()
        )

    def close(self) -> None:
        """Ends the workers and the thread."""
        if self.pool is not None:
            self.pool.close()
        self._thread.shutdown(wait=False)
