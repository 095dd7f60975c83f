"""``trencadis bench``: runs the benchmark that is named; its flags are named as vLLM's."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any, NoReturn

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.server.bench import datasets
from trencadis.server.bench.bench_metrics import GOALS, TITLES

USAGE = """\
usage: trencadis bench serve [--base-url URL] ...    load on a running server: TTFT, TPOT, ITL, E2EL, goodput
       trencadis bench throughput [--model M] ...    an engine in this process, all requests at once
       trencadis bench latency [--model M] ...       an engine in this process, one batch again and again
       trencadis bench startup [--model M] ...       seconds from nothing to an engine that answers
Flags and JSON results have vLLM's names; COMMAND --help lists them.
"""
BENCHMARKS = {
    "serve": "trencadis.server.bench.bench_serve:main",
    "throughput": "trencadis.server.bench.offline_benchmarks:measure_throughput",
    "latency": "trencadis.server.bench.offline_benchmarks:measure_latency",
    "startup": "trencadis.server.bench.bench_startup:main",
}


def main(words: Sequence[str]) -> int:
    """Runs a benchmark; returns the exit code.

    Raises:
        StartupError: one line about what is wrong.
    """
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if name else 2
    if name not in BENCHMARKS:
        raise StartupError(f"bench does not know {name[:40]}; known are {', '.join(BENCHMARKS)}.")
    module, _, function = BENCHMARKS[name].partition(":")
    return int(getattr(import_module(module), function)(words[1:]))


BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Formats of requests -> the routes that they are sent to."""
SAMPLING = (
    "top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty"
)  # fmt: skip
Adder = Any


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports errors in one line, and accepts ``--some_name`` for ``--some-name``."""

    def error(self, message: str) -> NoReturn:
        """Raises StartupError in place of argparse's exit."""
        raise StartupError(f"{self.prog}: {message}.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Normalises the dashes of flags before argparse parses them."""
        return super().parse_known_args([normalise_dashes(word) for word in args or ()], namespace)


def normalise_dashes(word: str) -> str:
    """Replaces ``_`` by ``-`` in the name of a flag."""
    name, sign, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + sign + value


def add_dataset_flags(add: Adder) -> None:
    """Adds the flags of the dataset."""
    add("--dataset-name", choices=datasets.NAMES, default="random", help="what is asked")
    add("--dataset-path", metavar="FILE", help="a ShareGPT JSON file, or lines of JSON for custom")
    add("--num-prompts", type=int, default=1000, help="requests")
    add("--seed", type=int, default=0, help="equal seeds ask equal requests at equal times")
    add("--input-len", type=int, help="as --random-input-len")
    add("--output-len", type=int, help="as the output length of the dataset in use")
    add("--random-input-len", type=int, default=1024, help="tokens of a random prompt")
    add("--random-output-len", type=int, default=128, help="tokens of an answer to it")
    add("--random-range-ratio", type=float, default=0.0, help="0.5: lengths from half to one and a half times")
    add("--random-prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    add("--random-mm-base-items-per-request", type=int, default=1, help="images of a request")
    add("--random-mm-num-mm-items-range-ratio", type=float, default=0.0, help="1: from none to twice as many")
    add("--random-mm-limit-mm-per-prompt", type=_parse_json_object, default={"image": 255}, help='JSON: {"image": 3}')
    add(
        "--random-mm-bucket-config", type=_parse_image_sizes, default={(256, 256, 1): 0.5, (720, 1280, 1): 0.5},
        help="shares of sizes: {(height, width, 1): share, ...}",
    )  # fmt: skip
    add("--sharegpt-output-len", type=int, help="tokens of an answer (default: as many as it had)")
    add("--custom-output-len", type=int, default=256, help="tokens of an answer, where the line does not say")
    add("--disable-shuffle", action="store_true", help="take a file's requests in their order")
    add("--no-oversample", action="store_true", help="ask no request of a file twice")


def make_serve_parser() -> OneLineParser:
    """Builds the parser of ``bench serve``."""
    parser = OneLineParser("trencadis bench serve", description="Puts load on a running server.", allow_abbrev=False)
    add = parser.add_argument
    add("--base-url", metavar="URL", help="the server (default: http://HOST:PORT)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add(
        "--backend",
        "--endpoint-type",
        choices=tuple(BACKENDS),
        help="form of the requests",
    )
    add("--endpoint", metavar="PATH", help="route (default: the backend's)")
    add("--model", help="name in the API (default: the server's first)")
    add("--served-model-name", help="name in the API, where --model is a folder")
    add("--tokenizer", metavar="FOLDER", help="counts prompts (default: the model's folder, or the server itself)")
    add("--header", metavar="KEY=VALUE", nargs="*", default=[], help="headers of each request")
    add("--insecure", action="store_true", help="take any certificate")
    add_dataset_flags(add)
    _add_traffic_flags(add)
    _add_result_flags(add)
    for name in SAMPLING:
        add("--" + name.replace("_", "-"), type=int if name == "top_k" else float, help="of each request")
    add("--logprobs", type=int, help="log-probabilities a token")
    add("--ignore-eos", action="store_true", help="answers end by their length alone; always so for random datasets")
    add("--extra-body", type=_parse_json_object, default={}, help="JSON: more fields of each request")
    for name in ("--trust-remote-code", "--skip-chat-template", "--skip-tokenizer-init", "--use-beam-search"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    add("--tokenizer-mode", help=argparse.SUPPRESS)
    return parser


def _add_traffic_flags(add: Adder) -> None:
    add("--request-rate", type=float, default=float("inf"), help="requests a second; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; below: bursts; above: more even; inf: even")
    add("--max-concurrency", type=int, help="most requests at a time")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="how the rate grows")
    add("--ramp-up-start-rps", type=float, help="rate at the first request")
    add("--ramp-up-end-rps", type=float, help="rate at the last")
    add("--num-warmups", type=int, default=0, help="requests before the clock starts")
    add("--ready-check-timeout-sec", type=float, default=0, help="wait so long for a first answer")
    add("--request-id-prefix", help="of x-request-id")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_result_flags(add: Adder) -> None:
    add("--percentile-metrics", default="ttft,tpot,itl", help=f"of {', '.join(TITLES)}")
    add("--metric-percentiles", default="99", help="for example 50,90,99")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help=f"what a good request takes at most: {GOALS}")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--append-result", action="store_true", help="append a line of JSON to the file")
    add("--save-detailed", action="store_true", help="with lengths, times, texts and errors of every request")
    add("--result-dir", metavar="DIR", help="where the file goes")
    add("--result-filename", metavar="FILE", help="its name (default: from label, rate, model and time)")
    add("--label", help="name of the run (default: the backend)")
    add("--metadata", metavar="KEY=VALUE", nargs="*", default=[], help="more entries of the file")


def _parse_json_object(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no JSON") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no JSON object")
    return found


FrameSize = tuple[int, int, int]
"""Height, width and number of frames, as in vLLM's flag."""


def _parse_image_sizes(text: str) -> dict[FrameSize, float]:
    """Parses ``{(height, width, 1): share}``, as Python or with the keys as JSON strings."""
    try:
        found = ast.literal_eval(text)
        read = {(ast.literal_eval(k) if isinstance(k, str) else k): float(v) for k, v in found.items()}
        good = all(len(k) == 3 and all(isinstance(n, int) and n > 0 for n in k) for k in read)
    except (ValueError, SyntaxError, AttributeError, TypeError):
        good, read = False, {}
    if not good or any(share < 0 for share in read.values()):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not like {{(256, 256, 1): 0.5}}")
    if any(key[2] != 1 and share for key, share in read.items()):
        raise argparse.ArgumentTypeError("sizes of more than one frame are videos, which are not drawn")
    return read


def apply_length_flags(args: argparse.Namespace) -> None:
    """Applies ``--input-len`` and ``--output-len`` to the flags of every dataset."""
    if args.input_len is not None:
        args.random_input_len = args.input_len
    if args.output_len is not None:
        args.random_output_len = args.sharegpt_output_len = args.custom_output_len = args.output_len


def parse_serve_args(words: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of ``bench serve``.

    Raises:
        StartupError: one line about the first wrong argument.
    """
    args = make_serve_parser().parse_args(list(words))
    apply_length_flags(args)
    args.backend = args.backend or ("openai-chat" if args.dataset_name == "random-mm" else "openai")
    args.endpoint = args.endpoint or BACKENDS[args.backend]
    args.url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    if not args.url.startswith(("http://", "https://")):
        raise StartupError(f"--base-url {args.url[:80]}: must begin with http:// or https://.")
    if args.endpoint.startswith("/v1"):
        args.url = args.url.removesuffix("/v1")
    if args.dataset_name == "random-mm" and args.backend != "openai-chat":
        raise StartupError("--dataset-name random-mm has images: it needs --backend openai-chat.")
    if args.dataset_name.startswith("random"):
        args.ignore_eos = True
    args.metrics = _parse_name_list(args.percentile_metrics, TITLES, "--percentile-metrics")
    args.percentiles = [_parse_percentile(one) for one in args.metric_percentiles.split(",")]
    args.goals = dict(_parse_goal(one) for one in args.goodput)
    args.headers = dict(_split_pair(one, "--header") for one in args.header)
    args.more = dict(_split_pair(one, "--metadata") for one in args.metadata)
    _check_traffic(args)
    return args


def _check_traffic(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "request_rate", "burstiness", "max_concurrency"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise StartupError(f"--{name.replace('_', '-')} must be above 0.")
    if args.ramp_up_strategy:
        start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
        if args.request_rate != float("inf"):
            raise StartupError("--ramp-up-strategy has rates of its own: leave out --request-rate.")
        if start is None or end is None or not 0 < start <= end:
            raise StartupError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0.")


def _parse_name_list(text: str, known: Collection[str], flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise StartupError(f"{flag}: {name[:40]!r} is none of {', '.join(known)}.")
    return names


def _parse_percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise StartupError(f"--metric-percentiles: {text[:40]!r} is no number from 0 to 100.")
    return value


def _parse_goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name not in GOALS or limit < 0:
        raise StartupError(f"--goodput: {text[:40]!r} is not NAME:MILLISECONDS with a name of {', '.join(GOALS)}.")
    return name, limit


def _split_pair(text: str, flag: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or "\n" in text or "\r" in text:
        raise StartupError(f"{flag} takes KEY=VALUE.")
    return name.strip(), value.strip()
