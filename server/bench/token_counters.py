"""Token counters for prompts: the server's ``/tokenize``, a local tokenizer, or a count of words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

from trencadis.server.bench.http_client import BenchClient

_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many off before must well back through years where much your way down "
    "should because long each just state those people too good very make world still see own work men day get here "
    "old life both between being under never know same last while might us great go come since against right came "
    "take used river stone glass table window garden market summer winter letter music paper bridge street corner "
    "morning evening story answer "
)
WORDS = _TEXT.split()


class TokenCounter(Protocol):
    """Turns texts into tokens and back."""

    async def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without special tokens around it."""
        ...

    async def decode(self, tokens: list[int]) -> str:
        """The text of ids."""
        ...


class LocalCounter:
    """A checkpoint's tokenizer in this process; needs no torch."""

    def __init__(self, folder: Path) -> None:
        from trencadis.server.text.checkpoint_tokenizer import Tokenizer

        self._tokenizer = Tokenizer.from_checkpoint(folder)

    async def encode(self, text: str) -> list[int]:
        """See TokenCounter."""
        return self._tokenizer.encode(text)

    async def decode(self, tokens: list[int]) -> str:
        """See TokenCounter."""
        return self._tokenizer.decode(tokens)


class ServerCounter:
    """``/tokenize`` and ``/detokenize`` of a server."""

    def __init__(self, client: BenchClient, model: str) -> None:
        self._client, self._model = client, model

    async def encode(self, text: str) -> list[int]:
        """See TokenCounter."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list((await self._client.fetch("/tokenize", body))["tokens"])

    async def decode(self, tokens: list[int]) -> str:
        """See TokenCounter."""
        body = {"model": self._model, "tokens": tokens}
        return str((await self._client.fetch("/detokenize", body))["prompt"])


class WordCounter:
    """Takes a word for a token: right for common words, and no more than near for other texts."""

    async def encode(self, text: str) -> list[Any]:
        """See TokenCounter; the ids are the words themselves."""
        return list(text.split())

    async def decode(self, tokens: list[Any]) -> str:
        """See TokenCounter."""
        return " ".join(map(str, tokens))


async def make_text(counter: TokenCounter, rng: random.Random, count: int) -> tuple[str, int]:
    """A text of ``count`` tokens from common words, and how many it has: texts that are cut may join again."""
    text = draw_words(rng, count)
    tokens = await counter.encode(text)
    for _ in range(4):
        if len(tokens) == count:
            break
        if len(tokens) > count:
            text = await counter.decode(tokens[:count])
        else:
            text = f"{text} {draw_words(rng, count - len(tokens))}"
        tokens = await counter.encode(text)
    return text, len(tokens)


def draw_words(rng: random.Random, count: int) -> str:
    """``count`` words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


async def make_counter(client: BenchClient, model: str, root: str, tokenizer: str) -> tuple[TokenCounter, str]:
    """What counts, and its name for the report.

    Args:
        model: the name in the API; ``root``: where the server has the model from; ``tokenizer``: as asked for.

    Raises:
        StartupError: the tokenizer that was asked for cannot be had.
    """
    if tokenizer:
        from trencadis.server.config.hub import TEXT, resolve

        return LocalCounter(resolve(tokenizer, patterns=TEXT)), tokenizer
    for folder in (model, root):
        if folder and (Path(folder) / "tokenizer.json").is_file():
            return LocalCounter(Path(folder)), folder
    server = ServerCounter(client, model)
    try:
        if await server.decode(await server.encode("one two three")):
            return server, f"{client.url}/tokenize"
    except (ConnectionError, KeyError, TypeError):
        pass
    return WordCounter(), "none (a word counts as a token)"
