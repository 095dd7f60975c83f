"""Offline scripts in the style of vLLM's quick starts: only the import is another."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from trencadis.assets import demo_path

MODEL = str(demo_path())
SMALL = 'dtype="float32", max_model_len=512, kv_cache_memory_bytes=16 << 20, threads=1'

GENERATE = """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The picture shows"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=6)

def main():
    llm = LLM(model=MODEL, SMALL)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    llm.close()

if __name__ == "__main__":
    main()
"""

CHAT_WITH_IMAGE = """
from dataclasses import asdict
from PIL import Image
from vllm import LLM, EngineArgs, FlexibleArgumentParser, SamplingParams, TextPrompt

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.add_argument("--max-tokens", type=int, default=5)
args = vars(parser.parse_args(["--model", MODEL, "--dtype", "float32", "--max_model_len", "512",
                               "--kv-cache-memory-bytes", "16MiB", "--limit-mm-per-prompt", '{"image": 2}']))
max_tokens = args.pop("max_tokens")
engine_args = EngineArgs(**args)
image = Image.new("RGB", (120, 90), "red")

with LLM(**asdict(engine_args)) as llm:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = max_tokens, 0.0
    question = [{"type": "image", "image": image}]
    conversation = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": [*question, {"type": "text", "text": "What colour is it?"}]},
    ]
    by_chat = llm.chat(conversation, params, use_tqdm=False)

    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [conversation[0], {"role": "user", "content": [{"type": "image"}, conversation[1]["content"][1]]}],
        tokenize=False, add_generation_prompt=True)
    by_prompt = llm.generate(TextPrompt(prompt=prompt, multi_modal_data={"image": image}), params)
    assert tokenizer.eos_token_id is not None
    print(by_chat[0].outputs[0].text == by_prompt[0].outputs[0].text, by_chat[0].num_image_tokens > 0)
"""

STREAM = """
import asyncio
from vllm import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

begun = asyncio.Event()

async def stream_response(engine, prompt, request_id, kind, stop_after=10**6, tokens=24):
    sampling_params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0, output_kind=kind)
    texts = []
    async for output in engine.generate(prompt, sampling_params, request_id):
        for completion in output.outputs:
            texts.append(completion.text)
        if request_id == "d":
            begun.set()
        if output.finished or len(texts) == stop_after:
            break
    return texts

async def abort_soon(engine):
    outputs = []
    async for output in engine.generate("A long one", SamplingParams(max_tokens=300, min_tokens=300), "long"):
        outputs.append(output)
        if len(outputs) == 2:
            await engine.abort("long")
    return outputs[-1].outputs[0].finish_reason

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, SMALL))
    try:
        deltas, whole, reason, few = await asyncio.gather(
            stream_response(engine, "Hello", "a", RequestOutputKind.DELTA),
            stream_response(engine, "Hello", "b", RequestOutputKind.FINAL_ONLY),
            abort_soon(engine),
            stream_response(engine, "Hello", "c", RequestOutputKind.CUMULATIVE, 3),
        )
        task = asyncio.create_task(stream_response(engine, "Bye", "d", RequestOutputKind.DELTA, tokens=300))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print(len(deltas) > 10, "".join(deltas) == whole[0], len(whole), reason, few[1].startswith(few[0]))
        for _ in range(500):
            ended = {m.labels["finished_reason"]: m.value for m in engine.get_metrics() if "success" in m.name}
            if ended.get("abort") == 3:
                break
            await asyncio.sleep(0.02)
        tokenizer = await engine.get_tokenizer()
        counts = f"{ended['length']:g} {ended['abort']:g}"
        print(counts, await engine.reset_prefix_cache(), tokenizer.eos_token_id is not None)
    finally:
        engine.shutdown()

asyncio.run(main())
"""

ENGINE_LOOP = """
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams

def process_requests(engine, test_prompts):
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.request_id == "2" and not request_output.finished:
                engine.abort_request("2")
            if request_output.finished:
                print(request_output.request_id, len(request_output.outputs[0].token_ids))

engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL, SMALL))
process_requests(engine, [
    ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=4, min_tokens=4)),
    ("To be or", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=5, min_tokens=5)),
    ("What is", SamplingParams(max_tokens=300, min_tokens=300)),
    ({"prompt_token_ids": [40, 41, 42]}, SamplingParams(n=2, max_tokens=3, min_tokens=3)),
])
engine.close()
"""

CLOSED = """
from vllm import LLM, TrencadisError

with LLM(model=MODEL, SMALL) as llm:
    pass
for call in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}]),
             lambda text: llm.llm_engine.add_request("1", text)):
    try:
        call("Hello")
    except TrencadisError as error:
        print(error, end=" ")
"""


def run(script: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a script prints once it imports from here."""
    changed = textwrap.dedent(script).replace("from vllm import", "from trencadis import").replace("SMALL", SMALL)
    space: dict[str, Any] = {"__name__": "__main__", "MODEL": MODEL}
    exec(compile(changed, "script", "exec"), space)
    return capsys.readouterr().out.splitlines()


def test_basic_generate(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(GENERATE, capsys)
    assert [line.partition(", Generated")[0] for line in lines] == [
        "Prompt: 'Hello, my name is'", "Prompt: 'The picture shows'",
    ]  # fmt: skip
    assert not any(line.endswith("Generated text: ''") for line in lines)


def test_chat_with_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CHAT_WITH_IMAGE, capsys) == ["True True"]


def test_async_streaming_with_abort(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(STREAM, capsys)
    assert first == "True True 1 abort True"
    assert second == "2 3 True True"


def test_engine_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(run(ENGINE_LOOP, capsys)) == ["0 4", "1 5", "3 3"]


def test_a_closed_engine_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = run(CLOSED, capsys)
    assert line == "This engine was closed; make another one. " * 3
