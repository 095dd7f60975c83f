"""``trencadis complete``: continues texts with a running server, line by line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

import httpx

from trencadis.core.errors import StartupError
from trencadis.server.cli.chat_command import get_first_model, stream_choices
from trencadis.server.config.hide_keys import mask

HELP = "Each line is continued on its own; Ctrl-D ends."


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
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
    args = parse_arguments(words)
    mask([args.api_key])
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    options = {k: v for k in ("max_tokens", "temperature") if (v := getattr(args, k)) is not None}
    url = args.url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        try:
            body = {"model": args.model or get_first_model(client), "stream": True, **options}
            given = args.quick if args.quick is not None else " ".join(args.prompt)
            for prompt in [given] if given else _read_lines():
                for choice in stream_choices(client, "/v1/completions", {**body, "prompt": prompt}):
                    print(choice["text"] or "", end="", flush=True)
                print()
        except httpx.TransportError as error:
            raise StartupError(f"no server answers at {url} ({error}).") from None
    return 0


def _read_lines() -> Iterator[str]:
    """Yields the lines of the terminal or pipe."""
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
