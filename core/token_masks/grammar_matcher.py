"""The grammars of a rank: compiled once, with one matcher per choice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from trencadis.core.step import UInt8
from trencadis.core.token_masks.canonical_ids_of_forced_text import Spelling, TokenHealing
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary, open_tokenizer
from trencadis.core.token_masks.token_rule_matchers import keep, remove

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILERS = 2
"""Threads that compile grammars, so that a slow one does not block the next."""

STATES = 32_000
"""Limit of a grammar's lexer states, 1 to 2 kB each; the library's own limit would take half a gigabyte."""

ROW_ITEMS = 10_000
"""Limit of the parser's items at one position.

An object with 500 optional properties has 2,000, the library's default.
"""

KEPT = 64
"""Number of compiled grammars that are kept without a choice using them; each takes from some KB to a few MB."""

NO_TEXT = Spelling()
"""The spelling where a grammar forces no text."""


class GrammarMatcher:
    """The state of one choice in its grammar.

    Where the grammar forces a text, each mask holds one id: the next one by the model's tokenizer. Masks depend only on
    the accepted ids, so that every rank derives the same, also if a choice is recreated.

    Args:
        matcher: the library's matcher, owned by this object.
        width: bytes of the library's masks, which are rounded up to words of 32 bits.
        healing: token healing for the matcher's vocabulary; None: the library's masks are used as they are.
    """

    def __init__(self, matcher: LLMatcher, width: int, healing: TokenHealing | None = None) -> None:
        self._matcher, self._healing = matcher, healing
        self._scratch: UInt8 = np.zeros(width, np.uint8)
        self._broken = ""
        self._last = -1
        """The last accepted id; -1: none."""
        self._run: tuple[int, ...] | None = None
        """Ids of a forced text, looked up at its start; empty: no text is forced; None: not looked up yet."""
        self._at = 0
        """Index of the next id in ``_run``."""
        self._forced = b""
        """The text that the grammar forces next, if its ids depend on the text that follows it."""
        self._spelling = NO_TEXT
        """Spelling of that text."""
        self._past: list[tuple[int, tuple[int, ...] | None, int]] = []
        """Values of ``_last``, ``_run`` and ``_at`` before each accepted id."""

    @property
    def accepting(self) -> bool:
        """True if the text may end here."""
        return not self._broken and self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """The error in one line; empty if there is none."""
        return self._broken or describe_problem(self._matcher)

    def restrict(self, row: UInt8) -> None:
        """Removes ids from ``row`` that the grammar does not accept next.

        EOS ids stay where the text may end; only they stay where it must end.
        """
        run = self._look_up() if self._run is None else self._run
        if run:
            keep(row, run[self._at])
            return
        if self._forced and not self._spelling.crossing:
            self._scratch[:] = 0
        else:
            self._compute_mask()
        for token in self._spelling.firsts:
            self._scratch[token >> 3] |= 1 << (token & 7)
        count = min(len(row), len(self._scratch))
        row[:count] &= self._scratch[:count]
        row[count:] = 0

    def respell(self, row: UInt8) -> None:
        """Writes to ``row`` all ids that begin the text which is forced next, canonical or not.

        No id if none is forced.
        """
        row[:] = 0
        if self._healing is not None and not self._broken:
            for token in self._healing.prefixes(self._matcher.compute_ff_bytes()):
                row[token >> 3] |= 1 << (token & 7)

    def _compute_mask(self) -> None:
        """Computes the library's mask, without ids that spell parts of a forced text."""
        try:
            self._matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, len(self._scratch))
        except BaseException as error:
            self._break(error)
        if self._forced and self._healing is not None:
            remove(self._scratch, self._healing.prefixes(self._forced))

    def accept(self, token: int) -> bool:
        """Advances by one token; returns False if the grammar does not accept it, or a limit is reached."""
        run, at = self._look_up() if self._run is None else self._run, self._at
        self._past.append((self._last, run, at))
        if at + 1 < len(run) and run[at] == token:
            self._at = at + 1
        else:
            self._run, self._at = None, 0
        self._last = token
        try:
            return self._matcher.consume_token(token)
        except BaseException as error:
            self._break(error)
        return False

    def _look_up(self) -> tuple[int, ...]:
        """Looks up the ids of the text that is forced from here; stores and returns them."""
        self._run, self._forced, self._spelling = (), b"", NO_TEXT
        if self._healing is None:
            return ()
        try:
            forced = self._matcher.compute_ff_bytes()
            if forced:
                self._spelling = self._healing.find(self._matcher, forced, self._last)
                self._run, self._forced = self._spelling.run, forced if self._spelling.firsts else b""
        except BaseException as error:
            self._break(error)
        return self._run

    def _break(self, error: BaseException) -> None:
        """Marks this matcher as failed after a panic of the library, which is not raised as an ``Exception``."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        self._broken = first_line(f"the grammar library failed: {error}")

    def rollback(self, count: int) -> None:
        """Undoes the last ``count`` tokens."""
        self._matcher.rollback(count)
        if count:
            self._last, self._run, self._at = self._past[-count]
            del self._past[-count:]
            self._run = self._run or None  # an empty run is looked up again

    def fork(self) -> GrammarMatcher:
        """Returns an independent copy in the same state."""
        made = GrammarMatcher(self._matcher.deep_copy(), len(self._scratch), self._healing)
        made._broken, made._forced, made._spelling = self._broken, self._forced, self._spelling
        made._last, made._run, made._at = self._last, self._run, self._at
        made._past = list(self._past)
        return made


class CompiledGrammars:
    """The vocabulary of a rank and the ``KEPT`` most recently used grammars compiled with it."""

    def __init__(self) -> None:
        self._tokenizer: Future[LLTokenizer] = Future()
        self._healing: TokenHealing | None = None
        self._opener: threading.Thread | None = None
        self._compilers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Decodes a packed vocabulary in a thread; a second one is ignored."""
        if self._opener is None:
            self._opener = threading.Thread(target=self._open, args=(data,), name="vocabulary", daemon=True)
            self._opener.start()

    def _open(self, data: bytes | bytearray) -> None:
        try:
            words = Vocabulary.unpack(data)
            tokenizer = words.open_tokenizer()
            self._healing = TokenHealing(tokenizer) if tokenizer.canonical else None
            self._tokenizer.set_result(open_tokenizer(words, tokenizer))
        except BaseException as error:
            self._tokenizer.set_exception(error)

    def prepare(self, text: str) -> Future[str]:
        """Compiles a grammar in a thread; the result is an error in one line, or empty."""
        with self._lock:
            found = self._compiled.get(text)
        if found is not None:
            known: Future[str] = Future()
            known.set_result(describe_problem(found))
            return known
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammars")
        return self._compilers.submit(self._prepare, text)

    def _prepare(self, text: str) -> str:
        try:
            return describe_problem(self.initial_matcher(text))
        except Exception as error:
            return first_line(f"{type(error).__name__}: {error}")

    def initial_matcher(self, text: str) -> LLMatcher:
        """Returns a grammar's matcher in its initial state, with its first mask computed; callers must copy it.

        Waits for the vocabulary. For a grammar that cannot be compiled, the matcher has an error.

        Raises:
            RuntimeError: no vocabulary was sent.
        """
        from llguidance import LLMatcher

        if self._opener is None:
            raise RuntimeError("the vocabulary of grammars was not sent")
        tokenizer = self._tokenizer.result()
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found
        made = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
        made.compute_bitmask()
        with self._lock:
            self._compiled[text] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made

    def matcher(self, text: str) -> GrammarMatcher:
        """Returns a new matcher of a grammar, for one choice."""
        made = self.initial_matcher(text)
        width = -(-self._tokenizer.result().vocab_size // 32) * 4
        return GrammarMatcher(made.deep_copy(), width, self._healing)


def parser_limits() -> LLParserLimits:
    """Returns the limits of a grammar, in machine-independent units, so that every rank fails in the same cases."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=ROW_ITEMS, max_lexer_states=STATES, verbose_errors=False)


def describe_problem(matcher: LLMatcher) -> str:
    """Returns a matcher's error in one line; empty if there is none."""
    return first_line(matcher.get_error()) if matcher.is_error() else ""


def first_line(text: str) -> str:
    """Returns the first line of a library message, cut to at most 150 characters."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 150 else f"{line[:149]}…"
