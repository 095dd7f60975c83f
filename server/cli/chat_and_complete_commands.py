"""``trencadis chat`` and ``trencadis complete``: small terminal clients of a running server.

``complete`` continues texts, line by line.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.config.resolve_settings import mask

HELP = "/image FILE adds an image to the next message, /clear forgets the conversation, /quit ends (as does Ctrl-D)."


class ChatSession:
    """One conversation with a running server."""

    def __init__(self, client: httpx.Client, model: str, options: JsonObject, system: str = "") -> None:
        self.client = client
        self.model = model
        self.options = options
        self.system = system
        self.messages: list[JsonObject] = []
        self.images: list[Path] = []
        self.clear()

    def clear(self) -> None:
        """Forgets the conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.images = []

    def ask(self, text: str) -> Iterator[str]:
        """Sends ``text`` and yields the answer in pieces; adds the complete answer to the conversation."""
        parts: list[JsonObject] = [{"type": "image_url", "image_url": {"url": make_data_url(p)}} for p in self.images]
        content: Json = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [*self.messages, {"role": "user", "content": content}]
        answer: list[str] = []
        for piece in self._stream(messages):
            answer.append(piece)
            yield piece
        self.images = []
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _stream(self, messages: list[JsonObject]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **self.options}
        for choice in stream_choices(self.client, "/v1/chat/completions", body):
            yield choice["delta"].get("content") or ""


def stream_choices(client: httpx.Client, path: str, body: JsonObject) -> Iterator[JsonObject]:
    """Yields the choices of each event of a streamed answer.

    Raises:
        StartupError: the server refuses, or fails during the stream.
    """
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            response.read()
            raise StartupError(f"the server answered {response.status_code}: {get_error_message(response)}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise StartupError(f"the server answered: {event['error'].get('message', event['error'])}")
            yield from event.get("choices", ())


def get_error_message(response: httpx.Response) -> str:
    """Returns the message of an error reply."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def make_data_url(path: Path) -> str:
    """Returns an image file as a data URL; the server detects the format."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}.") from None
    return "data:image/*;base64," + base64.b64encode(data).decode()


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parses the command line of ``chat``."""
    parser = make_parser("trencadis chat", "Talk to a running server. " + HELP)
    parser.add_argument("--image", action="append", default=[], type=Path, help="image file for the first message")
    parser.add_argument("--system", "--system-prompt", default="", help="system message")
    return parser.parse_args(list(words))


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Makes a parser with the options that both commands share."""
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("prompt", nargs="*", help="send this, print the answer and exit")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="the same")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--model", "--model-name", default="", help="served name (default: the server's first)")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY", ""), help="also VLLM_API_KEY")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, help="0: greedy sampling")
    return parser


class ServerSession(NamedTuple):
    """A connection to a server.

    Args:
        model: served name.
        options: sampling options of a request's body.
        prompt: the prompt of the command line; "" if there is none.
    """

    client: httpx.Client
    model: str
    options: JsonObject
    prompt: str


@contextmanager
def connect_to_server(args: argparse.Namespace) -> Iterator[ServerSession]:
    """Opens a connection as the arguments say.

    Raises:
        StartupError: no server answers, or it refuses.
    """
    mask([args.api_key])
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    options = {k: v for k in ("max_tokens", "temperature") if (v := getattr(args, k)) is not None}
    url = args.url.rstrip("/").removesuffix("/v1")
    prompt = args.quick if args.quick is not None else " ".join(args.prompt)
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        try:
            yield ServerSession(client, args.model or get_first_model(client), options, prompt)
        except httpx.TransportError as error:
            raise StartupError(f"no server answers at {url} ({error}).") from None


def main(words: Sequence[str]) -> int:
    """Runs a conversation; returns the exit code."""
    args = parse_arguments(words)
    with connect_to_server(args) as server:
        chat = ChatSession(server.client, server.model, server.options, args.system)
        chat.images = list(args.image)
        if server.prompt:
            print_answer(chat, server.prompt)
        else:
            converse(chat)
    return 0


def get_first_model(client: httpx.Client) -> str:
    """Returns the first model name that the server lists."""
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise StartupError(f"the server answered {response.status_code}: {get_error_message(response)}")
    return str(response.json()["data"][0]["id"])


def converse(chat: ChatSession) -> None:
    """Reads and answers line by line until the terminal or pipe ends."""
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{chat.model}. {HELP}")
    while True:
        try:
            text = input("> " if terminal else "").strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/clear":
            chat.clear()
        elif text.startswith("/image "):
            path = Path(text[7:].strip()).expanduser()
            print(f"{path}: no such file." if not path.is_file() else f"{path} goes with the next message.")
            chat.images += [path] if path.is_file() else []
        elif text:
            try:
                print_answer(chat, text)
            except StartupError as error:
                if not terminal:
                    raise
                print(f"\n{error}")


def print_answer(chat: ChatSession, text: str) -> None:
    """Prints the answer as it arrives; Ctrl-C ends the answer, not the conversation."""
    begun, pieces = time.monotonic(), 0
    try:
        for piece in chat.ask(text):
            print(piece, end="", flush=True)
            pieces += bool(piece)
    except KeyboardInterrupt:
        pieces = 0
    print()
    if sys.stdout.isatty() and pieces:
        print(f"({pieces} pieces, {pieces / (time.monotonic() - begun):.1f} a second)")


COMPLETE_HELP = "Each line is continued on its own; Ctrl-D ends."


def complete_main(words: Sequence[str]) -> int:
    """Continues texts; returns the exit code.

    Raises:
        StartupError: no server answers, or it refuses.
    """
    parser = make_parser("trencadis complete", "Continue texts with a running server. " + COMPLETE_HELP)
    with connect_to_server(parser.parse_args(list(words))) as server:
        body = {"model": server.model, "stream": True, **server.options}
        for prompt in [server.prompt] if server.prompt else _read_lines():
            for choice in stream_choices(server.client, "/v1/completions", {**body, "prompt": prompt}):
                print(choice["text"] or "", end="", flush=True)
            print()
    return 0


def _read_lines() -> Iterator[str]:
    """Yields the lines of the terminal or pipe."""
    terminal = sys.stdin.isatty()
    if terminal:
        print(COMPLETE_HELP)
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return
        if line:
            yield line
