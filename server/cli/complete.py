"""``trencadis complete``: continues texts with a running server, as they come."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence

import httpx

from trencadis.core.errors import StartupError
from trencadis.server.cli.chat import first_model, reason
from trencadis.server.config.cmdline import mask

HELP = "Each line is continued on its own; Ctrl-D ends."


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("trencadis complete", description="Continue texts with a running server. " + HELP)
    parser.add_argument("prompt", nargs="*", help="continue this, print the text and exit")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="the same")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--model", "--model-name", default="", help="served name (default: the server's first)")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY", ""), help="also VLLM_API_KEY")
    parser.add_argument("--max-tokens", type=int, help="longest text")
    parser.add_argument("--temperature", type=float, help="0: greedy sampling")
    return parser.parse_args(list(words))


def main(words: Sequence[str]) -> int:
    """Continues texts; returns the exit code.

    Raises:
        StartupError: no server answers, or it refuses.
    """
    args = arguments(words)
    mask([args.api_key])
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    options = {k: v for k in ("max_tokens", "temperature") if (v := getattr(args, k)) is not None}
    url = args.url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        try:
            body = {"model": args.model or first_model(client), "stream": True, **options}
            given = args.quick if args.quick is not None else " ".join(args.prompt)
            for prompt in [given] if given else _typed():
                for piece in pieces(client, {**body, "prompt": prompt}):
                    print(piece, end="", flush=True)
                print()
        except httpx.TransportError as error:
            raise StartupError(f"no server answers at {url} ({error}).") from None
    return 0


def _typed() -> Iterator[str]:
    """Lines of the terminal or pipe."""
    terminal = sys.stdin.isatty()
    if terminal:
        print(HELP)
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return
        if line:
            yield line


def pieces(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    """The continuation in pieces.

    Raises:
        StartupError: the server refuses, or fails on the way.
    """
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise StartupError(f"the server answered {response.status_code}: {reason(response)}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise StartupError(f"the server answered: {event['error'].get('message', event['error'])}")
            for choice in event.get("choices", ()):
                yield choice["text"] or ""
