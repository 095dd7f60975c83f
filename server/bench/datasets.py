"""The datasets of ``bench``: random texts, random texts with synthetic images, ShareGPT files, custom files.

Synthetic images are shapes over a gradient, no two alike, which compress about as photos do. Tokens of prompts are
counted by the server's ``/tokenize``, by a local tokenizer, or as words.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import mimetypes
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw

from trencadis.core.errors import StartupError
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
        from trencadis.server.config.model_download import TEXT, resolve

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


SHAPES = 24
QUALITY = 90


def draw_image(height: int, width: int, seed: int) -> Image.Image:
    """Draws the image of a seed."""
    rng = random.Random(seed)
    corners = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    made = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(made)
    for _ in range(SHAPES):
        x, y = rng.randrange(width), rng.randrange(height)
        right, low = x + rng.randrange(2, max(3, width // 3)), y + rng.randrange(2, max(3, height // 3))
        colour = tuple(rng.randrange(256) for _ in range(3))
        shape = rng.choice((pen.rectangle, pen.ellipse))
        shape((x, y, right, low), fill=colour)
    return made


def make_data_url(height: int, width: int, seed: int) -> str:
    """Returns the image as a JPEG in a data URL."""
    data = io.BytesIO()
    draw_image(height, width, seed).save(data, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


NAMES = ("random", "random-mm", "sharegpt", "custom")
AT_ONCE = 32
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Limits in tokens of ShareGPT's messages; shorter or longer ones are left out, as in vLLM."""


@dataclass(slots=True)
class BenchSample:
    """One request: a text, or messages; images as URLs; the number of output tokens (0: until the model stops)."""

    prompt: str
    prompt_tokens: int
    output_tokens: int
    images: list[str] = field(default_factory=list)
    messages: list[Json] | None = None


async def make_samples(args: argparse.Namespace, counter: TokenCounter) -> list[BenchSample]:
    """Returns the requests of a run.

    Raises:
        StartupError: a file cannot be used, or a length is out of range.
    """
    rng = random.Random(args.seed)
    if args.dataset_name in ("random", "random-mm"):
        if args.dataset_path:
            raise StartupError(f"--dataset-name {args.dataset_name} takes no --dataset-path: it reads no file.")
        made = await _make_random(args, counter, rng)
        if args.dataset_name == "random-mm":
            await asyncio.to_thread(_add_images, args, made, rng)
        return made
    if not args.dataset_path:
        raise StartupError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE.")
    path = Path(args.dataset_path).expanduser()
    read = _read_sharegpt if args.dataset_name == "sharegpt" else _read_custom
    try:
        found = [one async for one in _count_prompt_tokens(read(args, path, rng), counter, args.num_prompts)]
    except ConnectionError as error:
        raise StartupError(f"the server did not count the tokens of a prompt: {str(error)[:100]}.") from None
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} is no file of this kind: {str(error)[:100]}.") from None
    if not found:
        raise StartupError(f"{path} has no request that can be used.")
    if len(found) < args.num_prompts and not args.no_oversample:
        found += [rng.choice(found) for _ in range(args.num_prompts - len(found))]
    return found


def length_range(middle: int, ratio: float, least: int) -> tuple[int, int]:
    """Returns the bounds of lengths around ``middle``: floor(middle (1 - ratio)) to ceil(middle (1 + ratio))."""
    return max(least, math.floor(middle * (1 - ratio))), max(least, math.ceil(middle * (1 + ratio)))


async def _make_random(args: argparse.Namespace, counter: TokenCounter, rng: random.Random) -> list[BenchSample]:
    if not 0 <= args.random_range_ratio < 1:
        raise StartupError("--random-range-ratio must be at least 0 and below 1.")
    if args.random_prefix_len + length_range(args.random_input_len, args.random_range_ratio, 0)[0] < 1:
        raise StartupError("--random-input-len and --random-prefix-len leave prompts without a token.")
    prefix = (await make_text(counter, rng, args.random_prefix_len))[0] if args.random_prefix_len else ""
    positions = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> BenchSample:
        # Each has its own random numbers, so that requests do not depend on the order in which servers count tokens.
        own = random.Random((args.seed << 24) + number)
        wanted = own.randint(*length_range(args.random_input_len, args.random_range_ratio, 0))
        tokens = own.randint(*length_range(args.random_output_len, args.random_range_ratio, 1))
        async with positions:
            try:
                text, count = await make_text(counter, own, wanted)
            except ConnectionError as error:
                raise StartupError(f"the server did not count the tokens of a prompt: {str(error)[:100]}.") from None
        return BenchSample(f"{prefix} {text}" if prefix else text, args.random_prefix_len + count, tokens)

    return list(await asyncio.gather(*(one(i) for i in range(args.num_prompts))))


def _add_images(args: argparse.Namespace, made: list[BenchSample], rng: random.Random) -> None:
    limit = args.random_mm_limit_mm_per_prompt.get("image", 255)
    low, high = length_range(args.random_mm_base_items_per_request, args.random_mm_num_mm_items_range_ratio, 0)
    if low > limit:
        raise StartupError(f"requests have {low} images at least, but --random-mm-limit-mm-per-prompt says {limit}.")
    sizes = {size: share for size, share in args.random_mm_bucket_config.items() if share > 0}
    if not sizes:
        raise StartupError("--random-mm-bucket-config leaves no size of image.")
    for sample in made:
        for _ in range(rng.randint(low, min(high, limit))):
            height, width, _ = rng.choices(list(sizes), list(sizes.values()))[0]
            sample.images.append(make_data_url(height, width, rng.randrange(1 << 30)))


async def _count_prompt_tokens(made: Iterator[BenchSample], counter: TokenCounter, most: int) -> Any:
    """Yields at most ``most`` samples with the tokens of their prompts; selects those of ShareGPT as vLLM does."""
    count = 0
    for sample in made:
        if count == most:
            return
        sample.prompt_tokens = len(await counter.encode(sample.prompt))
        if sample.messages is None and isinstance(sample, AnsweredSample):
            sample.output_tokens = sample.output_tokens or len(await counter.encode(sample.answer))
            total = sample.prompt_tokens + sample.output_tokens
            if min(sample.prompt_tokens, sample.output_tokens) < SHORTEST or total > LONGEST:
                continue
            if sample.prompt_tokens > LONGEST_PROMPT:
                continue
        count += 1
        yield sample


@dataclass(slots=True)
class AnsweredSample(BenchSample):
    """A prompt with its recorded answer, whose length is requested again."""

    answer: str = ""


def _read_sharegpt(args: argparse.Namespace, path: Path, rng: random.Random) -> Iterator[BenchSample]:
    """Yields the first two messages of each conversation of a JSON file."""
    conversations = [
        one for one in json.loads(path.read_text(encoding="utf-8")) if len(one.get("conversations") or ()) > 1
    ]
    if not args.disable_shuffle:
        rng.shuffle(conversations)
    for conversation in conversations:
        first, second = (message.get("value") or "" for message in conversation["conversations"][:2])
        yield AnsweredSample(first, 0, args.sharegpt_output_len or 0, answer=second)


def _read_custom(args: argparse.Namespace, path: Path, rng: random.Random) -> Iterator[BenchSample]:
    """Yields samples from lines of JSON: ``prompt`` or ``messages``, and optionally ``output_tokens`` and
    ``image_files``.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not args.disable_shuffle:
        rng.shuffle(lines)
    for line in lines:
        messages = line.get("messages")
        if messages is None and not isinstance(line.get("prompt"), str):
            raise ValueError('a line needs "prompt" or "messages"')
        images = [_resolve_image_url(one, path.parent) for one in line.get("image_files") or ()]
        tokens = int(line.get("output_tokens") or args.custom_output_len)
        text = line["prompt"] if messages is None else json.dumps(messages)
        yield BenchSample(text, 0, max(0, tokens), images, messages)


def _resolve_image_url(name: str, folder: Path) -> str:
    """Returns a URL unchanged; a path, relative to the file's folder, as a data URL."""
    if name.startswith(("http://", "https://", "data:")):
        return name
    kind = mimetypes.guess_type(name)[0] or "image/*"
    return f"data:{kind};base64," + base64.b64encode((folder / name).read_bytes()).decode()
