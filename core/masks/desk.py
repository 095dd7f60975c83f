"""Matchers of a rank's choices, from when they are opened until they leave. Torch-free."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from trencadis.core.masks.vocabulary import Vocabulary, opened

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Desk:
    """The matchers of one rank.

    Args:
        vocab: ids that the model can draw.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._tokenizer: Future[LLTokenizer] = Future()
        self._opener: threading.Thread | None = None

    def vocabulary(self, data: bytes | bytearray) -> None:
        """Opens a packed vocabulary in a thread; a second one is ignored."""
        if self._opener is None:
            self._opener = threading.Thread(target=self._open, args=(data,), name="vocabulary", daemon=True)
            self._opener.start()

    def _open(self, data: bytes | bytearray) -> None:
        try:
            self._tokenizer.set_result(opened(Vocabulary.unpacked(data)))
        except BaseException as error:
            self._tokenizer.set_exception(error)
