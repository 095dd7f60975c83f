# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import io
import json

import httpx
import numpy as np
import pybase64 as base64
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

import vllm.envs as envs
from tests.utils import RemoteOpenAIServer
from vllm.config import ModelConfig
from vllm.v1.engine.detokenizer import check_stop_strings

MODEL_NAME = "Qwen/Qwen3-0.6B"
GEN_ENDPOINT = "/inference/v1/generate"
ABORT_ENDPOINT = "/inference/v1/abort_requests"


def get_vocab_size(model_name):
    config = ModelConfig(
        model=model_name,
        seed=0,
        dtype="bfloat16",
    )
    return config.get_vocab_size()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_NAME)


@pytest.fixture(scope="module")
def messages():
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "How many countries are in the EU?"},
    ]


@pytest.fixture(scope="module")
def server(request):
    args = [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "1024",
        "--enforce-eager",
        # On ROCm (e.g. MI355X/gfx950), bf16 GEMM results can differ by
        # 1 ULP when the batch dimension (M) changes, because different M
        # values cause the Tensile backend to select different tile
        # configurations with different fp32 accumulation orders. With
        # prefix caching, cache-miss prefills compute all tokens in one
        # pass (large M) while cache-hit requests compute only the
        # uncached suffix (small M), seeding a divergence that amplifies
        # through the residual stream and flips argmax tokens.
        # See: https://github.com/vllm-project/vllm/issues/33123
        #
        # Either disable prefix caching entirely, or enable it with
        # --deterministic-prefix-caching which forces cache-miss prefills
        # to split at block boundaries so the suffix GEMM shape is always
        # identical regardless of cache state.
        #
        # Option A: disable prefix caching
        "--no-enable-prefix-caching",
        #
        # Option B: deterministic prefix caching
        # "--enable-prefix-caching",
        # "--deterministic-prefix-caching",
        "--enable-scale-out",
    ]

    extra_args = getattr(request, "param", None)
    if extra_args is not None:
        args = args + (
            list(extra_args)
            if isinstance(extra_args, (list, tuple))
            else [str(extra_args)]
        )

    with RemoteOpenAIServer(MODEL_NAME, args) as remote_server:
        yield remote_server


@pytest_asyncio.fixture
async def client(server: RemoteOpenAIServer):
    transport = httpx.AsyncHTTPTransport(uds=server.uds) if server.uds else None
    headers = {"Authorization": f"Bearer {server.DUMMY_API_KEY}"}
    async with httpx.AsyncClient(
        transport=transport,
        base_url=server.url_root,
        timeout=600,
        headers=headers,
    ) as c:
        yield c


@pytest.mark.asyncio
async def test_generate_endpoint(client):
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 5},
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    data = resp.json()
    assert "choices" in data
    assert data["choices"][0].get("sampling_mask") is None


@pytest.mark.asyncio
async def test_generate_rejects_min_tokens_above_filled_max_tokens(client):
    """Explicit null max_tokens must not skip the min_tokens bound."""
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": None, "min_tokens": 2147483648},
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    assert resp.status_code == 400
    assert "min_tokens" in resp.json()["error"]["message"]

    followup = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 4},
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=followup)
    resp.raise_for_status()


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="sampling mask output is not supported by the Rust frontend",
)
@pytest.mark.parametrize(
    "server",
    [["--return-sampling-mask", "--logprobs-mode", "processed_logprobs"]],
    indirect=True,
)
async def test_generate_sampling_mask(client):
    top_k = 5
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "max_tokens": 5,
            "temperature": 0.8,
            "top_k": top_k,
            "top_p": 0.9,
            "ignore_eos": True,
            "seed": 0,
            "logprobs": top_k,
        },
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    choice = resp.json()["choices"][0]

    token_ids = choice["token_ids"]
    sampling_mask = choice["sampling_mask"]
    assert sampling_mask is not None
    assert len(token_ids) == len(sampling_mask)

    vocab_size = get_vocab_size(MODEL_NAME)
    logprobs_content = choice["logprobs"]["content"]
    for token_id, support, entry in zip(token_ids, sampling_mask, logprobs_content):
        assert support
        assert len(support) == len(set(support))
        assert all(0 <= support_token_id < vocab_size for support_token_id in support)
        assert token_id in support
        # processed_logprobs: exactly the support carries finite probability.
        for top in entry["top_logprobs"]:
            in_support = top["token_id"] in support
            assert in_support == (top["logprob"] > -9999.0)


@pytest.mark.asyncio
async def test_generate_defaults_max_tokens_when_omitted(client):
    """Regression: omitting ``max_tokens`` must not silently cap at 16.

    ``SamplingParams.max_tokens`` defaults to 16. Before the server-side
    defaulting was wired up, every request that didn't set ``max_tokens``
    truncated mid-generation. The server should now fill it in from
    ``max_model_len - prompt_len`` (matching ``/v1/chat/completions``).
    """
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "temperature": 0.0,
            "ignore_eos": True,
        },
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    data = resp.json()
    completion_tokens = len(data["choices"][0]["token_ids"])
    # max_model_len=1024 in the test fixture, prompt is 3 tokens, so we
    # should get ~1021 tokens of output (capped at max_model_len boundary).
    assert completion_tokens > 16, (
        f"expected server-side default to exceed the legacy 16-token cap, "
        f"got {completion_tokens}"
    )


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="parallel sampling (n > 1) is not supported by the Rust frontend",
)
async def test_generate_returns_all_choices_when_n_greater_than_one(client):
    """Regression: ``n > 1`` must return ``n`` choices.

    Non-streaming requests kept ``SamplingParams``' default output kind,
    ``CUMULATIVE``, so only the sequences updated during the last engine step
    reached the response and the others were silently dropped.
    """
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "n": 4},
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    data = resp.json()
    assert sorted(choice["index"] for choice in data["choices"]) == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_generate_stream(client):
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 5},
        "stream": True,
    }
    async with client.stream("POST", GEN_ENDPOINT, json=payload) as resp:
        resp.raise_for_status()
        chunks = []
        async for line in resp.aiter_lines():
            if not line.startswith("data: "):
                continue
            payload_str = line[len("data: ") :]
            if payload_str == "[DONE]":
                break
            chunks.append(json.loads(payload_str))

    assert len(chunks) > 0
    # Every chunk has choices with token_ids
    all_token_ids = []
    for chunk in chunks:
        assert "choices" in chunk
        assert len(chunk["choices"]) == 1
        choice = chunk["choices"][0]
        assert "token_ids" in choice
        assert len(choice["token_ids"]) > 0
        all_token_ids.extend(choice["token_ids"])

    # Last chunk should have a finish_reason
    assert chunks[-1]["choices"][0]["finish_reason"] is not None

    # Streaming should produce the same tokens as non-streaming
    non_stream_resp = await client.post(
        GEN_ENDPOINT,
        json={
            "model": MODEL_NAME,
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 5, "temperature": 0.0},
            "stream": False,
        },
    )
    non_stream_data = non_stream_resp.json()
    # Just verify we got the right number of tokens
    assert len(all_token_ids) == len(non_stream_data["choices"][0]["token_ids"])


@pytest.mark.asyncio
@pytest.mark.parametrize("logprobs_value", [0, 1, 5])
async def test_generate_logprobs(client, logprobs_value):
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "max_tokens": 5,
            "temperature": 0.0,
            "logprobs": logprobs_value,
        },
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    data = resp.json()
    choice = data["choices"][0]
    assert choice["logprobs"] is not None
    logprobs_content = choice["logprobs"]["content"]
    assert len(logprobs_content) == len(choice["token_ids"])
    for entry in logprobs_content:
        assert "logprob" in entry
        assert len(entry["top_logprobs"]) >= 1
        assert len(entry["top_logprobs"]) == max(logprobs_value, 1)


@pytest.mark.asyncio
async def test_generate_prompt_token_id_logprobs(client):
    token_ids = [11, 22, 33, 44, 55]
    rows = [[33], [44, 100], [55]]
    sampling_params = {
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "prompt_logprob_token_ids": rows,
        "prompt_logprob_start": 1,
    }
    payload = {
        "model": MODEL_NAME,
        "token_ids": token_ids,
        "sampling_params": sampling_params,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    data = resp.json()

    scores = np.load(io.BytesIO(base64.b64decode(data["prompt_token_id_logprobs"])))
    assert scores.shape == (3, 2)
    for row, target in enumerate(token_ids[2:]):
        expected = data["prompt_logprobs"][row + 2][str(target)]["logprob"]
        assert scores[row, 0] == pytest.approx(expected, abs=1e-3)
    assert np.isneginf(scores[[0, 2], 1]).all()

    stream_only_ids = {"prompt_logprob_token_ids": rows}
    resp = await client.post(
        GEN_ENDPOINT,
        json={**payload, "sampling_params": stream_only_ids, "stream": True},
    )
    assert resp.status_code == 400
    assert "prompt_logprob_token_ids" in resp.text

    too_few_rows = {**sampling_params, "prompt_logprob_token_ids": rows[:2]}
    resp = await client.post(
        GEN_ENDPOINT, json={**payload, "sampling_params": too_few_rows}
    )
    assert resp.status_code == 400
    assert "scored rows" in resp.text


@pytest.mark.asyncio
async def test_same_response_as_chat_completions(client, tokenizer, messages):
    token_ids = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        enable_thinking=False,  # default with Qwen3
        return_dict=True,  # default with Transformers v5
    ).input_ids

    for ignore_eos in [True, False]:
        payload = {
            "model": MODEL_NAME,
            "token_ids": token_ids,
            "sampling_params": {
                "max_tokens": 24,
                "temperature": 0.0,
                # NOTE coordinator will set this to skip detokenization
                "detokenize": False,
                "ignore_eos": ignore_eos,
            },
            "stream": False,
        }
        generate_resp = await client.post(GEN_ENDPOINT, json=payload)
        generate_data = generate_resp.json()
        gen_token_ids = generate_data["choices"][0]["token_ids"]
        generate_res = tokenizer.decode(gen_token_ids, skip_special_tokens=True)

        payload = {
            "model": MODEL_NAME,
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0.0,
            "stream": False,
            "ignore_eos": ignore_eos,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        completions_resp = await client.post("/v1/chat/completions", json=payload)
        completions_data = completions_resp.json()
        completions_res = completions_data["choices"][0]["message"]["content"]

        if ignore_eos:
            # When ignoring EOS, only compare up to the first EOS token
            # Post-EOS generation is undefined and may differ
            eos_tokens = {
                tokenizer.eos_token_id,
                *tokenizer.extra_special_tokens_ids,
            }
            # Find first EOS in generated tokens
            eos_pos = None
            for i, tid in enumerate(gen_token_ids):
                if tid in eos_tokens:
                    eos_pos = i
                    break
            if eos_pos is not None:
                gen_token_ids_truncated = gen_token_ids[:eos_pos]
                generate_res = tokenizer.decode(
                    gen_token_ids_truncated, skip_special_tokens=True
                )
                # Truncate completions_res to same length for comparison
                completions_res = completions_res[: len(generate_res)]

        assert generate_res == completions_res


@pytest.mark.asyncio
async def test_stop_string_workflow(client, tokenizer, messages):
    token_ids = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        enable_thinking=False,  # default with Qwen3
        return_dict=True,  # default with Transformers v5
    ).input_ids
    payload = {
        "model": MODEL_NAME,
        "token_ids": token_ids,
        "sampling_params": {
            "max_tokens": 24,
            "temperature": 0.0,
            "detokenize": False,
            # stop strings are only supported when detokenize is True.
            "stop": ["27 member"],
        },
        # TODO stream test is much more interesting
        "stream": False,
    }
    with pytest.raises(httpx.HTTPStatusError):
        generate_resp = await client.post(GEN_ENDPOINT, json=payload)
        generate_resp.raise_for_status()

    payload["sampling_params"]["stop"] = None
    generate_resp = await client.post(
        GEN_ENDPOINT, json=payload, headers={"X-Request-Id": "42"}
    )
    generate_data = generate_resp.json()
    generate_res = tokenizer.decode(
        generate_data["choices"][0]["token_ids"], skip_special_tokens=True
    )

    # NOTE This is under the responsibility of the coordinator
    # stop_checker = StopChecker(
    #     max_model_len=1024, get_tokenizer_for_seq=lambda _: tokenizer
    # )
    stop_str, truncate_to = check_stop_strings(
        generate_res, len(generate_res), ["27 member"], False
    )
    assert stop_str == "27 member"
    # abort request that hit stop string (requires tokens-only mode)
    # res = await client.post("/abort_requests", json={"request_ids": ["generate-tokens-42"]}) # noqa: E501
    # res.raise_for_status()
    generate_res = generate_res[:truncate_to]

    # Get stop_str response from chat completions
    payload = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0.0,
        "stream": False,
        "stop": ["27 member"],
        "chat_template_kwargs": dict(enable_thinking=False),
    }
    completions_resp = await client.post("/v1/chat/completions", json=payload)
    completions_data = completions_resp.json()
    completions_res = completions_data["choices"][0]["message"]["content"]
    assert generate_res == completions_res


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="--tokens-only is not supported by the Rust frontend",
)
@pytest.mark.parametrize("server", [["--tokens-only"]], indirect=True)
async def test_stop_strings_rejected_when_tokens_only(client):
    """--tokens-only forces detokenize=False after request validation, so
    stop strings must be rejected explicitly rather than silently ignored."""
    sampling_params = {"max_tokens": 5, "stop": ["never"]}
    payload = {
        "model": MODEL_NAME,
        "token_ids": [1, 2, 3],
        "sampling_params": sampling_params,
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    assert resp.status_code == 400
    assert "stop strings" in resp.json()["error"]["message"]

    sampling_params["stop"] = None
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "server",
    [
        [
            "--enable-lora",
            "--lora-modules",
            "Alice=charent/self_cognition_Alice",
            "Bob=charent/self_cognition_Bob",
            "--max-lora-rank",
            "64",
            "--max-cpu-loras",
            "2",
        ]
    ],
    indirect=True,
)
async def test_generate_with_lora_adapter(client, tokenizer, messages):
    # Verify adapters are listed
    models_resp = await client.get("/v1/models")
    models_resp.raise_for_status()
    models = {m["id"] for m in models_resp.json().get("data", [])}
    assert {"Alice", "Bob"}.issubset(models)

    # Generate using a LoRA adapter by specifying its name as the model
    payload = {
        "model": "Alice",
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 5},
        "stream": False,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()
    data = resp.json()
    assert "choices" in data

    token_ids = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        enable_thinking=False,  # default with Qwen3
        return_dict=True,  # default with Transformers v5
    ).input_ids
    payload = {
        "model": "Alice",
        "token_ids": token_ids,
        "sampling_params": {
            "max_tokens": 24,
            "temperature": 0.0,
            "detokenize": False,
        },
        "stream": False,
    }
    generate_resp = await client.post(GEN_ENDPOINT, json=payload)
    generate_data = generate_resp.json()
    generate_res = tokenizer.decode(
        generate_data["choices"][0]["token_ids"], skip_special_tokens=True
    )

    payload = {
        "model": "Alice",
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0.0,
        "stream": False,
        "chat_template_kwargs": dict(enable_thinking=False),
    }
    completions_resp = await client.post("/v1/chat/completions", json=payload)
    completions_data = completions_resp.json()
    completions_res = completions_data["choices"][0]["message"]["content"]

    assert generate_res == completions_res


def _structured_chat_body(messages, **overrides) -> dict:
    return {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": 64,
        "temperature": 0.0,
        "chat_template_kwargs": {"enable_thinking": True},
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {
                    "type": "object",
                    "properties": {"count": {"type": "integer"}},
                    "required": ["count"],
                },
            },
        },
        **overrides,
    }


async def _render_then_generate(client, body) -> tuple[dict, list[int]]:
    render_resp = await client.post("/v1/chat/completions/render", json=body)
    render_resp.raise_for_status()
    generate_request = render_resp.json()
    generate_resp = await client.post(GEN_ENDPOINT, json=generate_request)
    generate_resp.raise_for_status()
    return generate_request, generate_resp.json()["choices"][0]["token_ids"]


# deepseek_v3 reads `enable_thinking` from the template kwargs and uses Qwen3's
# <think> tokens, so the engine gates structured outputs differently when
# either reasoning field is dropped between render and generate.
@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="the Rust frontend does not forward reasoning fields to the engine",
)
@pytest.mark.parametrize(
    "server", [["--reasoning-parser", "deepseek_v3"]], indirect=True
)
async def test_render_then_generate_forwards_reasoning_parser_kwargs(client, messages):
    """With thinking on, structured outputs must wait for the reasoning to
    end on generate, the same as on chat."""
    body = _structured_chat_body(messages, return_token_ids=True)
    chat_resp = await client.post("/v1/chat/completions", json=body)
    chat_resp.raise_for_status()

    generate_request, token_ids = await _render_then_generate(client, body)

    assert generate_request["reasoning_ended"] is False
    assert token_ids == chat_resp.json()["choices"][0]["token_ids"]


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="the Rust frontend does not forward reasoning fields to the engine",
)
@pytest.mark.parametrize(
    "server", [["--reasoning-parser", "deepseek_v3"]], indirect=True
)
async def test_render_then_generate_forwards_reasoning_ended(
    client, tokenizer, messages
):
    """`include_reasoning=false` constrains from the first token on chat, so
    generate must too, even though the engine's parser expects thinking."""
    body = _structured_chat_body(messages, include_reasoning=False)

    generate_request, token_ids = await _render_then_generate(client, body)

    assert generate_request["reasoning_ended"] is True
    output = json.loads(tokenizer.decode(token_ids, skip_special_tokens=True))
    assert isinstance(output["count"], int)


def _chat_prompt_token_ids(tokenizer, messages) -> list[int]:
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        enable_thinking=False,  # default with Qwen3
        return_dict=True,  # default with Transformers v5
    ).input_ids


def _text_mode_payload(token_ids, **sampling_params) -> dict:
    return {
        "model": MODEL_NAME,
        "token_ids": token_ids,
        "sampling_params": {"max_tokens": 24, "temperature": 0.0, **sampling_params},
        "output_mode": "text",
        "stream": False,
    }


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="output_mode is not supported by the Rust frontend",
)
async def test_text_mode_matches_chat_completions(client, tokenizer, messages):
    token_ids = _chat_prompt_token_ids(tokenizer, messages)

    resp = await client.post(GEN_ENDPOINT, json=_text_mode_payload(token_ids))
    resp.raise_for_status()
    data = resp.json()
    assert data["output_mode"] == "text"

    payload = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0.0,
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    chat_resp = await client.post("/v1/chat/completions", json=payload)
    chat_content = chat_resp.json()["choices"][0]["message"]["content"]

    assert data["choices"][0]["text"] == chat_content
    assert data["choices"][0]["token_ids"]


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="output_mode is not supported by the Rust frontend",
)
async def test_text_mode_stream_matches_non_stream(client, tokenizer, messages):
    token_ids = _chat_prompt_token_ids(tokenizer, messages)
    payload = _text_mode_payload(token_ids)

    non_stream = await client.post(GEN_ENDPOINT, json=payload)
    non_stream.raise_for_status()

    chunks = []
    async with client.stream(
        "POST", GEN_ENDPOINT, json={**payload, "stream": True}
    ) as resp:
        resp.raise_for_status()
        async for line in resp.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line[len("data: ") :]))

    assert {chunk["output_mode"] for chunk in chunks} == {"text"}
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    streamed_text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert streamed_text == non_stream.json()["choices"][0]["text"]


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="output_mode is not supported by the Rust frontend",
)
@pytest.mark.parametrize(
    "overrides, expected",
    [
        pytest.param(
            {"sampling_params": {"detokenize": False}}, "detokenize", id="no-detok"
        ),
        pytest.param({"output_mode": "bogus"}, "output_mode", id="unsupported"),
        pytest.param(
            {"output_mode": "derender", "stream": True}, "stream", id="derender-stream"
        ),
    ],
)
async def test_text_mode_invalid_requests_return_400(client, overrides, expected):
    payload = {
        **_text_mode_payload([1, 2, 3], max_tokens=5),
        **overrides,
    }
    resp = await client.post(GEN_ENDPOINT, json=payload)

    assert resp.status_code == 400
    assert expected in resp.json()["error"]["message"]


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="output_mode is not supported by the Rust frontend",
)
async def test_derender_mode_without_parser_returns_text_message(
    client, tokenizer, messages
):
    """With no parser the message content is the engine's detokenized text."""
    token_ids = _chat_prompt_token_ids(tokenizer, messages)
    payload = _text_mode_payload(token_ids)

    text = (await client.post(GEN_ENDPOINT, json=payload)).json()
    resp = await client.post(GEN_ENDPOINT, json={**payload, "output_mode": "derender"})
    resp.raise_for_status()
    data = resp.json()

    assert data["output_mode"] == "derender"
    assert data["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert data["choices"][0]["token_ids"] == text["choices"][0]["token_ids"]


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="output_mode is not supported by the Rust frontend",
)
@pytest.mark.parametrize(
    "server",
    [["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]],
    indirect=True,
)
async def test_derender_mode_with_parser_matches_chat_completions(client, messages):
    chat = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0.0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    render = await client.post("/v1/chat/completions/render", json=chat)
    render.raise_for_status()
    generate_request = render.json()
    assert generate_request["parse_context"] is not None

    missing = await client.post(
        GEN_ENDPOINT,
        json={
            **{k: v for k, v in generate_request.items() if k != "parse_context"},
            "output_mode": "derender",
        },
    )
    assert missing.status_code == 400
    assert "parse_context" in missing.json()["error"]["message"]

    invalid = await client.post(
        GEN_ENDPOINT,
        json={
            **generate_request,
            "output_mode": "derender",
            "parse_context": {
                "tool_choice": {"type": "function", "function": {"name": "nope"}}
            },
        },
    )
    assert invalid.status_code == 400
    assert "tool_choice" in invalid.json()["error"]["message"]

    resp = await client.post(
        GEN_ENDPOINT, json={**generate_request, "output_mode": "derender"}
    )
    resp.raise_for_status()
    chat_resp = await client.post("/v1/chat/completions", json=chat)

    expected = chat_resp.json()["choices"][0]
    got = resp.json()["choices"][0]
    assert got["message"]["content"] == expected["message"]["content"]
    assert got["message"].get("tool_calls") == expected["message"].get("tool_calls")
    assert got["finish_reason"] == expected["finish_reason"]


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="--tokens-only is not supported by the Rust frontend",
)
@pytest.mark.parametrize("server", [["--tokens-only"]], indirect=True)
async def test_text_mode_rejected_when_tokens_only(client):
    """Without a tokenizer the detokenizer returns "", so the request must
    fail instead of answering 200 with empty text."""
    resp = await client.post(GEN_ENDPOINT, json=_text_mode_payload([1, 2, 3]))
    assert resp.status_code == 400
    assert "requires a tokenizer" in resp.json()["error"]["message"]

    payload = {**_text_mode_payload([1, 2, 3]), "output_mode": "tokens"}
    payload["sampling_params"]["detokenize"] = False
    resp = await client.post(GEN_ENDPOINT, json=payload)
    resp.raise_for_status()


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="the Rust frontend does not serve /inference/v1/abort_requests",
)
@pytest.mark.parametrize("output_mode", ["tokens", "text"])
async def test_stream_delivers_abort_finish_chunk(
    client, tokenizer, messages, output_mode
):
    """The final output after an abort has no new token IDs, but the
    stream must still deliver its finish reason."""
    payload = {
        **_text_mode_payload(
            _chat_prompt_token_ids(tokenizer, messages),
            max_tokens=900,
            ignore_eos=True,
        ),
        "output_mode": output_mode,
        "stream": True,
        "request_id": f"{output_mode}-abort-e2e",
    }

    chunks = []
    aborted = False
    async with client.stream("POST", GEN_ENDPOINT, json=payload) as resp:
        resp.raise_for_status()
        async for line in resp.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[len("data: ") :])
            chunks.append(chunk)
            if not aborted and chunk["choices"] and chunk["choices"][0]["token_ids"]:
                abort = await client.post(
                    ABORT_ENDPOINT,
                    json={"request_ids": [chunk["request_id"]]},
                )
                assert abort.status_code == 200
                aborted = True

    assert aborted
    assert {chunk["output_mode"] for chunk in chunks} == {output_mode}
    final_choice = chunks[-1]["choices"][0]
    assert final_choice["finish_reason"] == "abort"
    generated = sum(len(chunk["choices"][0]["token_ids"] or []) for chunk in chunks)
    assert generated < 900


@pytest.mark.asyncio
@pytest.mark.skipif(
    envs.VLLM_USE_RUST_FRONTEND,
    reason="the Rust frontend does not serve /inference/v1/abort_requests",
)
async def test_abort_requests_is_served_without_tokens_only(client):
    resp = await client.post(
        ABORT_ENDPOINT, json={"request_ids": ["generate-tokens-unknown"]}
    )
    assert resp.status_code == 200

    resp = await client.post(ABORT_ENDPOINT, json={})
    assert resp.status_code == 400

    # The unauthenticated path is only served with --tokens-only.
    resp = await client.post(
        "/abort_requests", json={"request_ids": ["generate-tokens-unknown"]}
    )
    assert resp.status_code == 404
