"""``bench serve``: what it asks, how it reads streams, vLLM's definitions and names, failures, its own cost."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import math
import random
import statistics
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.bench.paced_server import ROOT, paced
from trencadis.core.errors import StartupError
from trencadis.server.bench import bench_command, bench_metrics, bench_serve, datasets
from trencadis.server.bench.bench_metrics import BenchTiming, compute_request_timing
from trencadis.server.bench.bench_serve import RequestLoad, make_body, run_load
from trencadis.server.bench.http_client import BenchClient, Exchange, ResponseReader

SSE = b"data: "


def sse(*events) -> bytes:
    return b"".join(SSE + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"


def chat(content=None, **more):
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta | more.pop("delta", {}), **more}]}


@pytest.mark.parametrize("seed", range(20))
def test_a_response_is_read_alike_however_it_is_torn(seed):
    rng = random.Random(seed)
    body = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    chunks = b"".join(
        b"%x;ext=1\r\n%b\r\n" % (len(part), part)
        for i in range(0, len(body), 17) if (part := body[i : i + 17])
    )  # fmt: skip
    ends = rng.choice((b"0\r\n\r\n", b"0\r\ntrailer: x\r\nother: y\r\n\r\n"))
    for head, rest in (
        (b"transfer-encoding: chunked\r\n", chunks + ends), (b"Content-Length: %d\r\n" % len(body), body), (b"", body),
    ):  # fmt: skip
        whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + head + b"\r\n" + rest
        cuts = sorted(rng.randrange(len(whole)) for _ in range(rng.randrange(12)))
        reader, found = ResponseReader(), []
        for a, b in itertools.pairwise([0, *cuts, len(whole)]):
            assert not reader.done
            found += reader.feed(whole[a:b]) if b > a else []
        if not head:
            reader.end()
        assert reader.done and b"".join(found) == body and reader.status == 200


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", b"x" * 70_000, b"HTTP/1.1 200\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
             b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab"],
)  # fmt: skip
def test_what_is_no_response_is_an_error(data):
    with pytest.raises(ValueError):
        ResponseReader().feed(data)


def test_times_are_those_of_pieces_with_tokens():
    parts = [
        (1.0, chat("", delta={"role": "assistant"})), (3.0, chat("a")), (3.5, chat("")), (4.5, chat("b")),
        (4.5, chat(None, delta={"reasoning_content": "c"})), (9.0, chat(None, finish_reason="stop")),
        (9.5, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}),
    ]  # fmt: skip
    pieces = [(at, SSE + json.dumps(e).encode() + b"\r\n\r\n") for at, e in parts]
    torn = [p for at, data in pieces for p in ((at - 0.1, data[:9]), (at, data[9:]))]
    for given in (pieces, torn, [*pieces, (9.9, b": ping\n\ndata: [DONE]\n\n")]):
        found = compute_request_timing(Exchange(started=0.5, sent=1.0, status=200, pieces=list(given)), 99)
        assert (found.queued, found.ttft, found.latency, found.itl) == (0.5, 2.0, 3.5, [0.5, 1.0, 0.0])
        assert (found.prompt_tokens, found.tokens, found.text, found.error) == (7, 6, "abc", "")
        assert found.tpot == (3.5 - 2.0) / 5
    bare = compute_request_timing(Exchange(sent=0.0, status=200, pieces=[(1.0, sse({"choices": [{"text": "x"}]}))]), 5)
    assert (bare.prompt_tokens, bare.tokens, bare.tpot) == (5, 1, 0.0)


def test_failures_are_named():
    def error(status, data, given=""):
        return compute_request_timing(
            Exchange(status=status, error=given, pieces=[(0.0, data)] if data else []), 1
        ).error

    assert error(429, b'{"error": {"message": "queue\\nfull"}}') == "429: queue full"
    assert error(500, b"<html>") == "500: <html>" and error(404, b'{"error": "no"}') == "404: no"
    assert error(200, sse(chat("a"), {"error": {"message": "engine died"}})) == "engine died"
    assert error(200, sse(chat("", delta={"role": "assistant"}))) == "the answer has no token"
    assert error(200, b"data: {\n\n") == "an event of the stream is no JSON"
    assert error(0, b"", "no connection: refused") == "no connection: refused"
    reported = list(bench_metrics.format_failures(["a", "", "b", "a", *(f"k{i}" for i in range(20))]))
    assert reported[0] == "failed, 2 times: a" and reported[-1] == "failed, 12 further kinds"


def test_figures_are_vllms_definitions():
    rng = random.Random(0)
    made = []
    for i in range(200):
        itl = [rng.random() / 10 for _ in range(rng.randrange(0, 30))]
        ttft = rng.random()
        made.append(BenchTiming(100 + i * 0.05, 0.01 * i, ttft, itl, ttft + sum(itl), 10, len(itl) + 1))
    made.append(BenchTiming(error="429: full"))
    goals = {"ttft": 600.0, "tpot": 52.0}
    found = bench_metrics.compute_result(
        made, 20.0, ["ttft", "tpot", "itl", "e2el", "client_queue_time"], [50, 99.5], goals
    )
    good = made[:-1]
    tokens = sum(one.tokens for one in good)
    assert (found["completed"], found["failed"], found["total_input_tokens"]) == (200, 1, 2000)
    assert found["output_throughput"] == tokens / 20 and found["total_token_throughput"] == (tokens + 2000) / 20
    paces = [sum(o.itl) / len(o.itl) for o in good if o.itl]
    assert found["mean_tpot_ms"] == pytest.approx(1000 * statistics.fmean(paces))
    assert found["std_ttft_ms"] == pytest.approx(1000 * statistics.pstdev(o.ttft for o in good))
    assert (
        found["median_itl_ms"]
        == found["p50_itl_ms"]
        == pytest.approx(1000 * statistics.median(gap for o in good for gap in o.itl))
    )
    assert found["p99.5_e2el_ms"] == pytest.approx(1000 * np.percentile([o.latency for o in good], 99.5))
    within = [o.ttft <= 0.6 and (not o.itl or sum(o.itl) / len(o.itl) <= 0.052) for o in good]
    assert 0 < sum(within) < 200 and found["request_goodput"] == sum(within) / 20
    busy = [sum(o.sent <= t < o.sent + o.latency for o in good) for t in (p.sent for p in good)]
    assert found["max_concurrent_requests"] == max(busy)
    arrived = [o.sent + o.ttft + sum(o.itl[:i]) - good[0].sent for o in good for i in range(o.tokens)]
    assert found["max_output_tokens_per_s"] == max(sum(int(t) == s for t in arrived) for s in range(60))
    empty = bench_metrics.compute_result([BenchTiming(error="x")], 1.0, ["ttft"], [99], {})
    assert empty["completed"] == 0 and empty["p99_ttft_ms"] == 0.0 and empty["request_goodput"] is None


def test_arrivals_offer_the_rate_that_was_asked_for():
    for burstiness in (0.3, 1.0, 4.0, math.inf):
        found = np.array(bench_serve.make_send_times(bench_serve.make_rates(4000, 8.0), burstiness, 3, True))
        gaps = np.diff(found)
        assert found[-1] == pytest.approx(500.0) and (gaps >= 0).all()
        spread = 0.0 if math.isinf(burstiness) else 1 / math.sqrt(burstiness)
        assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.1, abs=1e-6)
    assert bench_serve.make_send_times(bench_serve.make_rates(3, math.inf), 1.0, 0, True) == [0.0, 0.0, 0.0]
    assert bench_serve.make_rates(3, 0, "linear", 2, 6) == [2, 4, 6]
    assert bench_serve.make_rates(3, 0, "exponential", 1, 16) == pytest.approx([1, 4, 16])


class Joining(datasets.WordCounter):
    """Texts that were cut count one token less the first time, as words do that join again."""

    def __init__(self) -> None:
        self.joined = 0

    async def decode(self, tokens) -> str:
        self.joined += 1
        return await super().decode(tokens[:-1] if self.joined == 1 else tokens)


def test_random_prompts_have_the_length_that_was_asked_for():
    for wanted in (0, 1, 7, 300):
        text, count = asyncio.run(datasets.make_text(Joining(), random.Random(1), wanted))
        assert count == wanted == len(text.split())


def sampled(*words: str) -> list[datasets.BenchSample]:
    return asyncio.run(datasets.make_samples(bench_command.parse_serve_args(words), datasets.WordCounter()))


def test_random_datasets_are_drawn_from_their_seed():
    base = ("--num-prompts", "40", "--input-len", "20", "--output-len", "10", "--random-range-ratio", "0.5")
    made = sampled(*base, "--random-prefix-len", "5")
    assert {one.prompt_tokens for one in made} <= set(range(15, 36)) and len({o.prompt_tokens for o in made}) > 8
    assert {one.output_tokens for one in made} <= set(range(5, 16))
    assert len({" ".join(o.prompt.split()[:5]) for o in made}) == 1 and len({o.prompt for o in made}) == 40
    assert [o.prompt for o in sampled(*base)] == [o.prompt for o in sampled(*base)]
    assert [o.prompt for o in sampled(*base)] != [o.prompt for o in sampled(*base, "--seed", "1")]


def test_images_are_drawn_in_the_sizes_and_numbers_asked_for():
    made = sampled(
        "--dataset-name", "random-mm", "--num-prompts", "30", "--input-len", "4",
        "--random-mm-base-items-per-request", "2", "--random-mm-num-mm-items-range-ratio", "0.5",
        "--random-mm-limit-mm-per-prompt", '{"image": 3}',
        "--random-mm-bucket-config", "{(32, 48, 1): 0.5, (28, 28, 1): 1}",
    )  # fmt: skip
    assert {len(one.images) for one in made} == {1, 2, 3}
    urls = [url for one in made for url in one.images]
    assert len(set(urls)) == len(urls)
    sizes = {Image.open(io.BytesIO(base64.b64decode(u.partition(",")[2]))).size for u in urls}
    assert sizes == {(48, 32), (28, 28)}


def test_sharegpt_and_custom_files(tmp_path):
    conversation = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i"}]
    other = [
        [conversation[0]],
        [{"value": "too short"}, conversation[1]],
        [{"value": "w " * 1100}, conversation[1]],
        conversation,
    ]
    share = tmp_path / "share.json"
    share.write_text(json.dumps([{"conversations": turns} for turns in other] + [{"id": 1}]))
    words = ("--dataset-name", "sharegpt", "--dataset-path", str(share), "--num-prompts", "3")
    assert [(o.prompt_tokens, o.output_tokens) for o in sampled(*words)] == [(5, 4)] * 3
    assert [o.output_tokens for o in sampled(*words, "--no-oversample", "--output-len", "9")] == [9]
    Image.new("RGB", (8, 8)).save(tmp_path / "p.png")
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"prompt": "one two", "output_tokens": 5, "image_files": ["p.png", "http://x/y.png"]}\n\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    first, second = sampled(
        "--dataset-name", "custom", "--dataset-path", str(own), "--num-prompts", "2", "--disable-shuffle",
        "--backend", "openai-chat",
    )  # fmt: skip
    assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (2, 5, 256)
    assert first.images[0].startswith("data:image/png;base64,") and first.images[1] == "http://x/y.png"
    args = bench_command.parse_serve_args(
        ["--backend", "openai-chat", "--temperature", "0", "--extra-body", '{"seed": 3}']
    )
    body = make_body(args, "m", first)
    assert [p["type"] for p in body["messages"][0]["content"]] == ["text", "image_url", "image_url"]
    assert (body["max_completion_tokens"], body["temperature"], body["seed"]) == (5, 0.0, 3)
    assert make_body(args, "m", second)["messages"] == [{"role": "user", "content": "hi"}]
    for text, why in (("{", "no file of this kind"), ('{"x": 1}', 'needs "prompt"'), ("", "no request that can")):
        own.write_text(text)
        with pytest.raises(StartupError, match=why):
            sampled("--dataset-name", "custom", "--dataset-path", str(own))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"), (["--goodput", "itl:3"], "--goodput: 'itl:3'"),
        (["--metric-percentiles", "101"], "'101' is no number"), (["--percentile-metrics", "x"], "'x' is none of ttft"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--backend", "openai", "--dataset-name", "random-mm"], "needs --backend openai-chat"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--header", "x"], "--header takes KEY=VALUE"),
        (["--random-mm-bucket-config", "{(1,2,16): 1}"], "videos"), (["--base-url", "x:1"], "must begin with http"),
        (["--random-mm-bucket-config", "(3"], "is not like"), (["--dataset-path", "x"], "takes no --dataset-path"),
        (["--random-input-len", "0"], "without a token"), (["--random-range-ratio", "1"], "below 1"),
        (["--port", "9", "--num-prompts", "1"], "no server answers at http://127.0.0.1:9 "),
    ],
)  # fmt: skip
def test_wrong_command_lines_are_one_line(words, why):
    with pytest.raises(StartupError) as raised:
        if "--port" in words:
            bench_command.main(["serve", *words])
        sampled(*words)
    assert why in str(raised.value) and "\n" not in str(raised.value)


KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
}  # fmt: skip
"""Of the file that vLLM's benchmark writes, without details."""


def test_a_run_over_sockets_counts_asks_and_saves(tmp_path, monkeypatch, capsys):
    own = tmp_path / "own.jsonl"
    prompts = ["plain one", "status:429 two", "cut three", "plain four", "always:500 five"] * 4
    own.write_text(
        "".join(json.dumps({"prompt": f"{p} {i}", "output_tokens": 4}) + "\n" for i, p in enumerate(prompts))
    )
    monkeypatch.setenv("VLLM_API_KEY", "secret-key")
    words = ["serve", "--dataset-name", "custom", "--dataset-path", str(own), "--num-prompts", "20"]
    words += [
        "--num-warmups",
        "2",
        "--disable-shuffle",
        "--max-concurrency",
        "3",
        "--request-rate",
        "500",
        "--result-filename",
        "r.json",
    ]
    with paced(0.001, 0.001) as url:
        for backend in ("openai", "openai-chat"):
            more = ["--base-url", url + "/v1", "--backend", backend, "--append-result", "--result-dir", str(tmp_path)]
            more += ["--metadata", "card=none", *["--save-detailed"][: backend == "openai"]]
            assert bench_command.main([*words, *more]) == 0
    said = capsys.readouterr()
    assert "failed, 4 times: the connection ended in the middle of the response" in said.out
    assert "failed, 4 times: 429: as told" in said.out and "secret-key" not in said.out + said.err
    detailed, plain = (json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines())
    assert set(plain) == KEYS | {k for k in plain if k.startswith("client_")} | {"card"}
    assert set(detailed) == set(plain) | set(bench_metrics.DETAILS)
    assert (plain["completed"], plain["failed"], plain["total_output_tokens"]) == (8, 12, 32)
    assert detailed["errors"][1] == "429: as told" and detailed["generated_texts"][0] == "x x x x "
    assert detailed["output_lens"][:5] == [4, 0, 0, 4, 0] and 1 <= plain["max_concurrent_requests"] <= 3


def test_the_clients_process_has_neither_torch_nor_transformers():
    code = (
        "import sys; from trencadis.server.bench import bench_command, bench_serve, datasets;"
        "from trencadis.assets import demo_path; datasets.LocalCounter(demo_path());"
        "print({'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": ROOT}, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


async def measured(url: str, rows: int, tokens: int) -> tuple[list[BenchTiming], dict[str, float]]:
    client = BenchClient(url)
    args = argparse.Namespace(backend="openai", logprobs=None, ignore_eos=True, extra_body={}, top_k=None, top_p=None,
                              min_p=None, temperature=0, frequency_penalty=None, presence_penalty=None,
                              repetition_penalty=None)  # fmt: skip
    body = json.dumps(make_body(args, "paced", datasets.BenchSample("a b", 2, tokens))).encode()
    load = RequestLoad([client.make_request("/v1/completions", body)] * rows, [0.013 * i for i in range(rows)])
    found, _, own = await run_load(client, load)
    client.close()
    return [compute_request_timing(one, 2) for one in found], own.summarise()


@pytest.mark.long
@pytest.mark.parametrize(("rows", "tokens"), [(8, 100), (64, 60), (256, 40)])
def test_a_server_of_known_timing_is_measured_within_one_percent(capsys, rows, tokens):
    """The truth is when the server wrote its tokens: under other work neither process keeps to the script."""
    with paced(4.0, 0.05) as url:
        asyncio.run(measured(url, rows, 2))
        made, own = asyncio.run(measured(url, rows, tokens))
        streams = httpx.get(url + "/served", trust_env=False).json()["streams"][rows:]
    assert not any(one.error for one in made) and len(streams) == rows
    truth = {
        "ttft": statistics.median(first for first, _ in streams),
        "tpot": statistics.median((last - first) / (tokens - 1) for first, last in streams),
        "e2el": statistics.median(last for _, last in streams),
    }
    found = {
        name: statistics.median(values) for name, values in bench_metrics.collect_series(made).items() if name in truth
    }
    with capsys.disabled():
        shares = (f"{n} {1000 * found[n]:.2f} ms ({1000 * (found[n] - truth[n]):+.2f} ms)" for n in truth)
        print(f"\n{rows} streams: {', '.join(shares)}; CPU a piece {own['client_cpu_us_per_piece']:.0f} us")
        print(f"lateness p50 {own['client_loop_lag_p50_ms']:.2f}, p99 {own['client_loop_lag_p99_ms']:.2f} ms")
    for name, value in truth.items():
        assert found[name] == pytest.approx(value, rel=0.01)
