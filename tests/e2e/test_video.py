"""Chats with videos against qwen-vl-utils and transformers, offline and over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracles import qwen_vl_utils
from tests.oracles.transformers_model import Oracle, assert_same
from tests.oracles.video_chats import LIMITS, chat, video_inputs
from tests.traffic import video_clips
from tests.traffic.server_process import RunningServer, server
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.errors import BadRequest, Forbidden, TooLarge

LENGTH = 12
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
COLOURS = ("red", "green", "blue", "yellow", "black", "white")


def scene(seed: int, count: int, height: int = 120, width: int = 160) -> np.ndarray:
    """Frames in which a square moves over a coloured ground."""
    rng = np.random.default_rng(seed)
    ground, square = rng.choice(COLOURS, 2, replace=False)
    shown = []
    for i in range(count):
        frame = Image.new("RGB", (width, height), str(ground))
        x = 5 + (i * 7) % (width - 50)
        frame.paste(Image.new("RGB", (40, 40), str(square)), (x, 30))
        shown.append(np.asarray(frame))
    return np.stack(shown)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(demo_path(), **LIMITS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(str(demo_path()), dtype="float32", kv_cache_memory_bytes=64 << 20)
    yield made
    made.close()


def ask(oracle: Oracle, array: np.ndarray, rate: float, **options: Any) -> tuple[Any, Any]:
    """The oracle's inputs and answer for a file of these frames."""
    question = chat("clip")
    inputs = video_inputs(oracle, question, *qwen_vl_utils.of_file(array, rate, **LIMITS, **options))
    return inputs, oracle.answer(inputs, LENGTH)


CASES: list[tuple[int, float, dict[str, Any]]] = [
    (13, 10.0, {}),
    (20, 10.0, {"fps": 5.0, "max_frames": 6}),
    (9, 4.0, {"nframes": 7}),
]


def test_answers_equal_transformers(llm: LLM, oracle: Oracle) -> None:
    pairs = []
    for seed, (count, fps, options) in enumerate(CASES):
        array = scene(seed, count)
        inputs, answer = ask(oracle, array, fps, **options)
        data = video_clips.animation(array, "WEBP", round(1000 / fps))
        out = llm.chat(chat(data, **options), GREEDY)[0]
        assert out.prompt_token_ids == inputs["input_ids"][0].tolist()
        pairs.append((out.outputs[0].token_ids, answer))
    assert_same(pairs)


def test_a_list_of_frames_in_every_form(llm: LLM, oracle: Oracle, tmp_path: Path) -> None:
    array = scene(7, 3)
    inputs = video_inputs(oracle, chat("clip"), *qwen_vl_utils.of_list(video_clips.make_frames(array), **LIMITS))
    answer = oracle.answer(inputs, LENGTH)
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, image in zip(files, video_clips.make_frames(array), strict=True):
        file.write_bytes(video_clips.png(image))
    urls = [f"data:image/png;base64,{base64.b64encode(f.read_bytes()).decode()}" for f in files]
    forms: list[Any] = [
        video_clips.make_frames(array),
        array,
        list(array),
        torch.from_numpy(array).permute(0, 3, 1, 2).float() / 255,
        urls,
        [str(f) for f in files],
        files,
        [f.read_bytes() for f in files],
    ]
    # The first pass of qwen-vl-utils over a list keeps within the request's limits, so they are given.
    got = llm.chat([chat(form, **LIMITS) for form in forms], GREEDY)
    assert all(g.prompt_token_ids == inputs["input_ids"][0].tolist() for g in got)
    assert_same([(g.outputs[0].token_ids, answer) for g in got])
    raw = "<|vision_start|><|video_pad|><|vision_end|>See?"
    data = {"prompt": raw, "multi_modal_data": {"video": array}, "mm_processor_kwargs": LIMITS}
    two = {"prompt": raw + raw, "multi_modal_data": {"video": [array, video_clips.make_frames(array)]}}
    one, both = llm.generate([data, two], GREEDY)
    pad = llm.service.config.video_token
    assert 2 * one.prompt_token_ids.count(pad) == both.prompt_token_ids.count(pad) > 0


def test_a_clip_larger_than_the_arena(oracle: Oracle) -> None:
    """Twenty temporal patches of 24 tokens, an arena of two largest images, steps shorter than a frame."""
    llm = LLM(
        str(demo_path()), dtype="float32", kv_cache_memory_bytes=64 << 20, encoder_cache_images=2,
        max_num_batched_tokens=50, max_num_seqs=4,
    )  # fmt: skip
    try:
        array = scene(3, 40)
        inputs, answer = ask(oracle, array, 10.0, nframes=40)
        rows = llm.engine.scheduler.arena.capacity
        assert int(inputs["video_grid_thw"].prod()) // 4 > 2 * rows
        out = llm.chat(chat(video_clips.animation(array, "WEBP", 100), nframes=40), GREEDY)[0]
        assert out.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert_same([(out.outputs[0].token_ids, answer)])
        assert llm.engine.scheduler.arena.evictions > 0
        llm.engine.scheduler.check()
    finally:
        llm.close()


def test_equal_frames_at_another_rate_share_rows_but_only_the_first_blocks(llm: LLM, oracle: Oracle) -> None:
    """The frames are in the arena already; from the second pair on their positions differ, so no block is shared."""
    array = scene(11, 8)
    before = llm.engine.scheduler.totals.images_encoded
    first = llm.chat(chat(video_clips.make_frames(array), fps=2.0), GREEDY)[0]
    encoded = llm.engine.scheduler.totals.images_encoded
    again = llm.chat(chat(video_clips.make_frames(array), fps=2.0), GREEDY)[0]
    other = llm.chat(chat(video_clips.make_frames(array), fps=0.5), GREEDY)[0]
    assert encoded - before == 4 and llm.engine.scheduler.totals.images_encoded == encoded
    assert first.prompt_token_ids == other.prompt_token_ids
    start = first.prompt_token_ids.index(llm.service.config.video_token)
    pair = first.prompt_token_ids.count(llm.service.config.video_token) // 4
    assert again.num_cached_tokens > start + 2 * pair and other.num_cached_tokens <= start + pair
    inputs = video_inputs(oracle, chat("clip"), qwen_vl_utils.of_list(video_clips.make_frames(array))[0], 0.5)
    if inputs["input_ids"].shape[1] == len(other.prompt_token_ids):
        assert_same([(other.outputs[0].token_ids, oracle.answer(inputs, LENGTH))])


def test_refusals_offline(llm: LLM, tmp_path: Path) -> None:
    gif = video_clips.animation(scene(0, 4))
    for video, options, error, text in [
        (b"nothing", {}, Exception, "no MP4"),
        ([], {}, BadRequest, "no frames"),
        (gif, {"nframes": 9}, BadRequest, "4 frames"),
        (gif, {"min_pixels": 60_000}, BadRequest, "limit"),
        (f"file://{tmp_path}/x.mp4", {}, Forbidden, "not allowed"),
        (str(tmp_path / "x.mp4"), {}, Exception, "could not be read"),
        ([video_clips.png(Image.new("RGB", (9, 9)))] * 769, {}, TooLarge, "769 frames"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            llm.chat(chat(video, **dict[str, Any](options)), GREEDY)


FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--limit-mm-per-prompt", "image=4,video=2")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip.webp").write_bytes(video_clips.animation(scene(0, 13), "WEBP", 100))
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, media: Path) -> Iterator[RunningServer]:
    with server(tmp_path_factory.mktemp("served"), *FLAGS, "--allowed-local-media-path", str(media)) as running:
        yield running


def post(running: RunningServer, part: dict[str, Any], **fields: Any) -> Any:
    content = [part, {"type": "text", "text": "What is in the video?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": LENGTH, **fields}
    return running.http.post("/v1/chat/completions", json=body)


def url(data: bytes, kind: str = "video/mp4") -> dict[str, Any]:
    return {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}


def test_served_in_every_form(running: RunningServer, llm: LLM, media: Path) -> None:
    """OpenAI's part, qwen-vl-utils' part, bare paths, streamed, n, and what usage says."""
    data = (media / "clip.webp").read_bytes()
    want = llm.chat(chat(data), GREEDY)[0]
    parts: list[dict[str, Any]] = [
        {"type": "video_url", "video_url": url(data)},
        {"type": "video", "video": "clip.webp"},
        {"type": "video", "video": str(media / "clip.webp")},
        {"type": "video", "video": f"file://{media}/clip.webp"},
    ]
    for part in parts:
        reply = post(running, part, return_image_sizes=True, return_token_ids=True).json()
        assert reply["choices"][0]["message"]["content"] == want.outputs[0].text
        details = reply["usage"]["prompt_tokens_details"]
        count = want.prompt_token_ids.count(llm.service.config.video_token)
        assert (details["video_tokens"], details["image_tokens"]) == (count, 0)
        assert details["videos"] == [
            {"width": 168, "height": 112, "grid": [2, 8, 12], "tokens": count, "fps": pytest.approx(4 / 13 * 10),
             "frames": [0, 4, 8, 12], "total_frames": 13}
        ]  # fmt: skip
    streamed = post(running, parts[1], stream=True).text
    assert streamed.rstrip().endswith("data: [DONE]")
    assert len(post(running, parts[1], n=3, temperature=1.0, seed=5).json()["choices"]) == 3
    faster = post(running, parts[1], mm_processor_kwargs={"fps": 5.0}, return_image_sizes=True).json()
    assert len(faster["usage"]["prompt_tokens_details"]["videos"][0]["frames"]) == 6


def test_frames_and_a_file_over_http(running: RunningServer, llm: LLM) -> None:
    array = scene(5, 3)
    want = llm.chat(chat(video_clips.make_frames(array)), GREEDY)[0].outputs[0].text
    pngs = [video_clips.png(p) for p in video_clips.make_frames(array)]
    listed = {"type": "video", "video": [url(p, "image/png")["url"] for p in pngs]}
    joined = ",".join(base64.b64encode(p).decode() for p in pngs)
    comma = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{joined}"}}
    film = video_clips.film(scene(2, 25))
    shown = llm.chat(chat(film), GREEDY)[0].outputs[0].text
    file = {"type": "video_url", "video_url": url(film)}
    for part, answer in ((listed, want), (comma, want), (file, shown)):
        assert post(running, part).json()["choices"][0]["message"]["content"] == answer


def test_refusals_over_http(running: RunningServer, media: Path) -> None:
    gif = video_clips.animation(scene(0, 4))
    path = "messages[0].content[0]"
    bad: list[tuple[dict[str, Any], int, str]] = [
        ({"type": "video_url", "video_url": url(b"nothing at all")}, 415, path),
        ({"type": "video_url", "video_url": url(gif[:150])}, 400, path),
        ({"type": "video_url", "video_url": {"url": "clip.webp"}}, 400, path),
        ({"type": "video", "video": "/etc/passwd"}, 403, path),
        ({"type": "video", "video": "../../etc/passwd"}, 403, path),
        ({"type": "video", "video": "missing.mp4"}, 422, path),
        ({"type": "video", "video": []}, 400, path),
        ({"type": "video_url", "video_url": url(gif), "nframes": 40}, 400, path),
        ({"type": "video_url", "video_url": url(gif), "fps": "fast"}, 400, f"{path}.fps"),
        ({"type": "video_url", "video_url": url(gif), "max_pixels": 10, "min_pixels": 20}, 400, f"{path}.min_pixels"),
        ({"type": "video_url", "video_url": {"url": "http://127.0.0.1/x.mp4"}}, 403, path),
    ]
    for part, status, param in bad:
        reply = post(running, part)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), (part.get("type"), error)
        assert len(error["message"]) < 200 and "/tmp" not in error["message"]
    part = {"type": "video_url", "video_url": url(gif)}
    body = {"messages": [{"role": "user", "content": [part] * 3}]}
    reply = running.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "video")
    assert post(running, part).status_code == 200


EMULATED: dict[str, Any] = {
    "device": "hpu", "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256, "warmup": "skip",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "padded, one step ahead": {"policy": "padded", "async_depth": 1},
    "small": {
        "encoder_cache_images": 2,
        "max_num_batched_tokens": 40,
        "kv_cache_memory_bytes": 4 << 20,
        "max_model_len": 1024,
    },
    "emulated": EMULATED,
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_forty_clips(variant: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random clips, all at a time, so that they share launches and preempt one another: transformers' answers."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "256,576,1024,2048")
    flags = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, **VARIANTS[variant]}
    if variant == "emulated":
        del flags["kv_cache_memory_bytes"]
    llm = LLM(str(demo_path()), **flags)
    try:
        chats, answers, ids = [], [], []
        for seed in range(40):
            rng = np.random.default_rng(seed)
            count = int(rng.integers(2, 40))
            array = scene(100 + seed, count, int(rng.integers(40, 200)), int(rng.integers(60, 200)))
            options: dict[str, Any] = {}
            if rng.random() < 0.5:
                options = {"fps": float(rng.choice([1.0, 5.0, 8.0]))}
            elif rng.random() < 0.5:
                options = {"nframes": int(rng.integers(2, count + 1)) // 2 * 2}
            inputs, answer = ask(oracle, array, 10.0, **options)
            ids.append(inputs["input_ids"][0].tolist())
            answers.append(answer)
            chats.append(chat(video_clips.animation(array, "WEBP", 100), **options))
        got = llm.chat(chats, GREEDY)
        assert [g.prompt_token_ids for g in got] == ids
        assert_same([(g.outputs[0].token_ids, a) for g, a in zip(got, answers, strict=True)])
        s = llm.engine.scheduler
        counts = f"{s.totals.images_encoded} patches, {s.totals.preemptions} preemptions, {s.arena.evictions} evictions"
        print(f"{variant}: 40 clips, {counts}")
        s.check()
    finally:
        llm.close()
