"""Token counters for prompts: the server's ``/tokenize``, a local tokenizer, or a count of words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from trencadis.core.json_types import Json
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
    """Converts texts into tokens and back."""

    async def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, without added special tokens."""
        ...

    async def decode(self, tokens: list[int]) -> str:
        """Returns the text of ids."""
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
    """Counts tokens by ``/tokenize`` and ``/detokenize`` of a server."""

    def __init__(self, client: BenchClient, model: str) -> None:
        self._client, self._model = client, model

    async def encode(self, text: str) -> list[int]:
        """Tokenizes ``text`` on the server; see TokenCounter."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list((await self._client.fetch("/tokenize", body))["tokens"])

    async def decode(self, tokens: list[int]) -> str:
        """See TokenCounter."""
        body = {"model": self._model, "tokens": tokens}
        return str((await self._client.fetch("/detokenize", body))["prompt"])


class WordCounter:
    """Takes a word for a token: exact for common words, approximate for other texts."""

    async def encode(self, text: str) -> list[Json]:
        """See TokenCounter; the ids are the words themselves."""
        return list(text.split())

    async def decode(self, tokens: list[Json]) -> str:
        """See TokenCounter."""
        return " ".join(map(str, tokens))


async def make_text(counter: TokenCounter, rng: random.Random, count: int) -> tuple[str, int]:
    """Returns a text of about ``count`` tokens from common words, and its exact number: tokens of a cut text may
    join again.
    """
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
    """Returns ``count`` random words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


async def make_counter(client: BenchClient, model: str, root: str, tokenizer: str) -> tuple[TokenCounter, str]:
    """Chooses the token counter; returns it and its name for the report.

    Args:
        model: the name in the API; ``root``: the server's path or id of the model; ``tokenizer``: the requested one.

    Raises:
        StartupError: the requested tokenizer cannot be loaded.
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
