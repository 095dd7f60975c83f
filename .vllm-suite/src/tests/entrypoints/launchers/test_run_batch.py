# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import asyncio
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock, patch

import pytest

import vllm.envs as envs
from vllm.assets.audio import AudioAsset
from vllm.connections import HTTPConnection
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers import run_batch as run_batch_module
from vllm.entrypoints.launchers.run_batch import (
    BatchProgressTracker,
    BatchRequestOutput,
    BatchTranscriptionRequest,
    batch_output_writer,
    dispatch_batch,
    download_bytes_from_url,
    ignore_admission_limits,
    is_same_local_file,
    make_arg_parser,
    make_transcription_wrapper,
    open_batch_input,
    upload_data,
    url_matches,
    validate_batch,
    validate_run_batch_args,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.mem_constants import MiB_bytes
from vllm.v1.engine.exceptions import EngineDeadError

CHAT_MODEL_NAME = "hmellor/tiny-random-LlamaForCausalLM"
EMBEDDING_MODEL_NAME = "intfloat/multilingual-e5-small"
RERANKER_MODEL_NAME = "BAAI/bge-reranker-v2-m3"
REASONING_MODEL_NAME = "Qwen/Qwen3-0.6B"
SPEECH_LARGE_MODEL_NAME = "openai/whisper-large-v3"
SPEECH_SMALL_MODEL_NAME = "openai/whisper-small"

INPUT_BATCH = "\n".join(
    json.dumps(req)
    for req in [
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": CHAT_MODEL_NAME,
                "messages": [
                    {
                        "role": "system",
                        "content": "You are a helpful assistant.",
                    },
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": CHAT_MODEL_NAME,
                "messages": [
                    {
                        "role": "system",
                        "content": "You are an unhelpful assistant.",
                    },
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
        {
            "custom_id": "request-3",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "NonExistModel",
                "messages": [
                    {
                        "role": "system",
                        "content": "You are an unhelpful assistant.",
                    },
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
        {
            "custom_id": "request-4",
            "method": "POST",
            "url": "/bad_url",
            "body": {
                "model": CHAT_MODEL_NAME,
                "messages": [
                    {
                        "role": "system",
                        "content": "You are an unhelpful assistant.",
                    },
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
        {
            "custom_id": "request-5",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "stream": "True",
                "model": CHAT_MODEL_NAME,
                "messages": [
                    {
                        "role": "system",
                        "content": "You are an unhelpful assistant.",
                    },
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
    ]
)

INVALID_INPUT_BATCH = "\n".join(
    json.dumps(req)
    for req in [
        {
            "invalid_field": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": CHAT_MODEL_NAME,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": CHAT_MODEL_NAME,
                "messages": [
                    {"role": "system", "content": "You are an unhelpful assistant."},
                    {"role": "user", "content": "Hello world!"},
                ],
                "max_tokens": 1000,
            },
        },
    ]
)

INPUT_EMBEDDING_BATCH = "\n".join(
    json.dumps(req)
    for req in [
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {
                "model": EMBEDDING_MODEL_NAME,
                "input": "You are a helpful assistant.",
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {
                "model": EMBEDDING_MODEL_NAME,
                "input": "You are an unhelpful assistant.",
            },
        },
        {
            "custom_id": "request-3",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {
                "model": EMBEDDING_MODEL_NAME,
                "input": "Hello world!",
            },
        },
        {
            "custom_id": "request-4",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {
                "model": "NonExistModel",
                "input": "Hello world!",
            },
        },
    ]
)

_SCORE_RERANK_DOCUMENTS = [
    "The capital of Brazil is Brasilia.",
    "The capital of France is Paris.",
]

INPUT_SCORE_BATCH = "\n".join(
    json.dumps(req)
    for req in [
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/score",
            "body": {
                "model": RERANKER_MODEL_NAME,
                "queries": "What is the capital of France?",
                "documents": _SCORE_RERANK_DOCUMENTS,
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v1/score",
            "body": {
                "model": RERANKER_MODEL_NAME,
                "queries": "What is the capital of France?",
                "documents": _SCORE_RERANK_DOCUMENTS,
            },
        },
    ]
)

INPUT_RERANK_BATCH = "\n".join(
    json.dumps(req)
    for req in [
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/rerank",
            "body": {
                "model": RERANKER_MODEL_NAME,
                "query": "What is the capital of France?",
                "documents": _SCORE_RERANK_DOCUMENTS,
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v1/rerank",
            "body": {
                "model": RERANKER_MODEL_NAME,
                "query": "What is the capital of France?",
                "documents": _SCORE_RERANK_DOCUMENTS,
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v2/rerank",
            "body": {
                "model": RERANKER_MODEL_NAME,
                "query": "What is the capital of France?",
                "documents": _SCORE_RERANK_DOCUMENTS,
            },
        },
    ]
)

INPUT_REASONING_BATCH = "\n".join(
    json.dumps(req)
    for req in [
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": REASONING_MODEL_NAME,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "Solve this math problem: 2+2=?"},
                ],
            },
        },
        {
            "custom_id": "request-2",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": REASONING_MODEL_NAME,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "What is the capital of France?"},
                ],
            },
        },
    ]
)

MINIMAL_WAV_BASE64 = "UklGRigAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQQAAAAAAP9/"
_EXACT_LIMIT_AUDIO = b"a" * MiB_bytes
_OVERSIZED_BASE64_AUDIO = "A" * (4 * ((MiB_bytes + 2) // 3))
_OVERSIZED_HTTP_AUDIO = b"b" * (MiB_bytes + 1)


class _BatchHTTPServer(ThreadingHTTPServer):
    request_paths: list[str]


class _BatchHTTPHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _BatchHTTPServer)
        server.request_paths.append(self.path)

        if self.path == "/exact-limit":
            self._send_body(_EXACT_LIMIT_AUDIO)
            return

        if self.path == "/oversized-chunked":
            self.send_response(200)
            self.end_headers()
            self._write_body(_OVERSIZED_HTTP_AUDIO)
            return

        self.send_error(404, "Unknown batch HTTP test path")

    def _send_body(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._write_body(body)

    def _write_body(self, body: bytes) -> None:
        try:
            for offset in range(0, len(body), 64 * 1024):
                self.wfile.write(body[offset : offset + 64 * 1024])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, fmt: str, *args: object) -> None:
        return


@pytest.fixture
def batch_http_server() -> Generator[_BatchHTTPServer, None, None]:
    server = _BatchHTTPServer(("127.0.0.1", 0), _BatchHTTPHandler)
    server.request_paths = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _batch_http_url(server: _BatchHTTPServer, path: str) -> str:
    return f"http://localhost:{server.server_port}{path}"


async def _close_async_connection(connection: HTTPConnection) -> None:
    if connection._async_client is not None:
        await connection._async_client.close()


INPUT_TRANSCRIPTION_BATCH = (
    json.dumps(
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/audio/transcriptions",
            "body": {
                "model": SPEECH_LARGE_MODEL_NAME,
                "file_url": f"data:audio/wav;base64,{MINIMAL_WAV_BASE64}",
                "response_format": "json",
            },
        }
    )
    + "\n"
)

INPUT_TRANSCRIPTION_HTTP_BATCH = (
    json.dumps(
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/audio/transcriptions",
            "body": {
                "model": SPEECH_LARGE_MODEL_NAME,
                "file_url": AudioAsset("mary_had_lamb").url,
                "language": "en",
                "response_format": "json",
            },
        }
    )
    + "\n"
)

INPUT_TRANSLATION_BATCH = (
    json.dumps(
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/audio/translations",
            "body": {
                "model": SPEECH_SMALL_MODEL_NAME,
                "file_url": AudioAsset("mary_had_lamb").url,
                "response_format": "text",
                "language": "it",
                "to_language": "en",
                "temperature": 0.0,
            },
        }
    )
    + "\n"
)

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "unit": {
                    "type": "string",
                    "enum": ["celsius", "fahrenheit"],
                },
            },
            "required": ["location"],
        },
    },
}

INPUT_TOOL_CALLING_BATCH = json.dumps(
    {
        "custom_id": "request-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": REASONING_MODEL_NAME,
            "messages": [
                {"role": "user", "content": "What is the weather in San Francisco?"},
            ],
            "tools": [WEATHER_TOOL],
            "tool_choice": "required",
            "max_tokens": 1000,
        },
    }
)


def test_empty_file():
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write("")
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                EMBEDDING_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        assert contents.strip() == ""


def test_completions():
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                CHAT_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            # Ensure that the output format conforms to the openai api.
            # Validation should throw if the schema is wrong.
            BatchRequestOutput.model_validate_json(line)


def test_completions_invalid_input():
    """Ensure that we fail when the input doesn't conform to the openai api."""
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INVALID_INPUT_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                CHAT_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode != 0, f"{proc=}"


def test_embeddings():
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_EMBEDDING_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                EMBEDDING_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            # Ensure that the output format conforms to the openai api.
            # Validation should throw if the schema is wrong.
            BatchRequestOutput.model_validate_json(line)


@pytest.mark.parametrize("input_batch", [INPUT_SCORE_BATCH, INPUT_RERANK_BATCH])
def test_score(input_batch):
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(input_batch)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                RERANKER_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            # Ensure that the output format conforms to the openai api.
            # Validation should throw if the schema is wrong.
            BatchRequestOutput.model_validate_json(line)

            # Ensure that there is no error in the response.
            line_dict = json.loads(line)
            assert isinstance(line_dict, dict)
            assert line_dict["error"] is None


def test_reasoning_parser():
    """Test that reasoning_parser parameter works correctly in run_batch."""
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_REASONING_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                REASONING_MODEL_NAME,
                "--reasoning-parser",
                "qwen3",
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            # Ensure that the output format conforms to the openai api.
            # Validation should throw if the schema is wrong.
            BatchRequestOutput.model_validate_json(line)

            # Ensure that there is no error in the response.
            line_dict = json.loads(line)
            assert isinstance(line_dict, dict)
            assert line_dict["error"] is None

            # Check that reasoning is present and not empty
            reasoning = line_dict["response"]["body"]["choices"][0]["message"][
                "reasoning"
            ]
            assert reasoning is not None
            assert len(reasoning) > 0


def test_transcription():
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_TRANSCRIPTION_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                SPEECH_LARGE_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        print(f"\n\ncontents: {contents}\n\n")
        for line in contents.strip().split("\n"):
            BatchRequestOutput.model_validate_json(line)

            line_dict = json.loads(line)
            assert isinstance(line_dict, dict)
            assert line_dict["error"] is None

            response_body = line_dict["response"]["body"]
            assert response_body is not None
            assert "text" in response_body
            assert "usage" in response_body


def test_transcription_http_url():
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_TRANSCRIPTION_HTTP_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                SPEECH_LARGE_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            BatchRequestOutput.model_validate_json(line)

            line_dict = json.loads(line)
            assert isinstance(line_dict, dict)
            assert line_dict["error"] is None

            response_body = line_dict["response"]["body"]
            assert response_body is not None
            assert "text" in response_body
            assert "usage" in response_body

            transcription_text = response_body["text"]
            assert "Mary had a little lamb" in transcription_text


def test_translation():
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_TRANSLATION_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                SPEECH_SMALL_MODEL_NAME,
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            BatchRequestOutput.model_validate_json(line)

            line_dict = json.loads(line)
            assert isinstance(line_dict, dict)
            assert line_dict["error"] is None

            response_body = line_dict["response"]["body"]
            assert response_body is not None
            assert "text" in response_body

            translation_text = response_body["text"]
            translation_text_lower = str(translation_text).strip().lower()
            assert "mary" in translation_text_lower or "lamb" in translation_text_lower


def test_tool_calling():
    """Test that tool calling works correctly in run_batch.
    Verifies that requests with tools return tool_calls in the response.
    """
    with (
        tempfile.NamedTemporaryFile("w") as input_file,
        tempfile.NamedTemporaryFile("r") as output_file,
    ):
        input_file.write(INPUT_TOOL_CALLING_BATCH)
        input_file.flush()
        proc = subprocess.Popen(
            [
                "vllm",
                "run-batch",
                "-i",
                input_file.name,
                "-o",
                output_file.name,
                "--model",
                REASONING_MODEL_NAME,
                "--enable-auto-tool-choice",
                "--tool-call-parser",
                "hermes",
            ],
        )
        proc.communicate()
        proc.wait()
        assert proc.returncode == 0, f"{proc=}"

        contents = output_file.read()
        for line in contents.strip().split("\n"):
            if not line.strip():  # Skip empty lines
                continue
            # Ensure that the output format conforms to the openai api.
            # Validation should throw if the schema is wrong.
            BatchRequestOutput.model_validate_json(line)

            # Ensure that there is no error in the response.
            line_dict = json.loads(line)
            assert isinstance(line_dict, dict)
            assert line_dict["error"] is None

            # Check that tool_calls are present in the response
            # With tool_choice="required", the model must call a tool
            response_body = line_dict["response"]["body"]
            assert response_body is not None
            message = response_body["choices"][0]["message"]
            assert "tool_calls" in message
            tool_calls = message.get("tool_calls")
            # With tool_choice="required", tool_calls must be present and non-empty
            assert tool_calls is not None
            assert isinstance(tool_calls, list)
            assert len(tool_calls) > 0
            # Verify tool_calls have the expected structure
            for tool_call in tool_calls:
                assert "id" in tool_call
                assert "type" in tool_call
                assert tool_call["type"] == "function"
                assert "function" in tool_call
                assert "name" in tool_call["function"]
                assert "arguments" in tool_call["function"]
                # Verify the tool name matches our tool definition
                assert tool_call["function"]["name"] == "get_current_weather"


# ---------------------------------------------------------------------------
# Unit tests for download_bytes_from_url SSRF protection
# ---------------------------------------------------------------------------


def _make_aiohttp_mocks(response_data: bytes = b"fake-data", status: int = 200):
    """Create mock objects that simulate aiohttp.ClientSession context managers."""

    async def iter_chunked(chunk_size: int):
        del chunk_size
        yield response_data

    mock_resp = MagicMock()
    mock_resp.status = status
    mock_resp.content_length = len(response_data)
    mock_resp.content.iter_chunked = iter_chunked
    mock_resp.read = AsyncMock(return_value=response_data)
    mock_resp.__aenter__ = AsyncMock(return_value=mock_resp)
    mock_resp.__aexit__ = AsyncMock(return_value=False)

    mock_session = MagicMock()
    mock_session.get = MagicMock(return_value=mock_resp)
    mock_session.__aenter__ = AsyncMock(return_value=mock_session)
    mock_session.__aexit__ = AsyncMock(return_value=False)
    return mock_session


@pytest.mark.asyncio
async def test_download_bytes_data_url_bypasses_domain_check():
    """data: URLs must work regardless of the domain allowlist."""
    data_url = f"data:audio/wav;base64,{MINIMAL_WAV_BASE64}"
    result = await download_bytes_from_url(
        data_url, allowed_media_domains=["example.com"]
    )
    assert isinstance(result, bytes)
    assert len(result) > 0


@pytest.mark.asyncio
async def test_download_bytes_rejects_disallowed_domain():
    """HTTP URLs whose hostname is not in the allowlist must be rejected."""
    url = "https://evil.internal/secret"
    with pytest.raises(VLLMValidationError, match="allowed domains") as exc_info:
        await download_bytes_from_url(url, allowed_media_domains=["example.com"])
    # URL validation failures carry structured metadata for the frontend.
    assert exc_info.value.parameter == "url"
    assert exc_info.value.value == "evil.internal"


@pytest.mark.asyncio
async def test_download_bytes_rejects_unsupported_scheme():
    """Unsupported URL schemes are rejected with structured metadata."""
    with pytest.raises(VLLMValidationError, match="Unsupported URL scheme") as exc_info:
        await download_bytes_from_url("ftp://example.com/file")
    assert exc_info.value.parameter == "url"
    assert exc_info.value.value == "ftp"


@pytest.mark.asyncio
async def test_download_bytes_rejects_cloud_metadata_ip():
    """Cloud metadata endpoints must be blocked when an allowlist is set."""
    url = "http://169.254.169.254/latest/meta-data/"
    with pytest.raises(VLLMValidationError, match="allowed domains"):
        await download_bytes_from_url(url, allowed_media_domains=["example.com"])


@pytest.mark.asyncio
async def test_download_bytes_rejects_internal_ip():
    """Private-range IPs must be blocked when an allowlist is set."""
    for internal_url in [
        "http://10.0.0.1/secret",
        "http://192.168.1.1/admin",
        "http://127.0.0.1:8080/internal",
    ]:
        with pytest.raises(VLLMValidationError, match="allowed domains"):
            await download_bytes_from_url(
                internal_url, allowed_media_domains=["example.com"]
            )


@pytest.mark.asyncio
async def test_download_bytes_allows_permitted_domain():
    """HTTP URLs whose hostname IS in the allowlist must be fetched."""
    url = "https://example.com/audio.wav"
    expected = b"audio-bytes"
    mock_session = _make_aiohttp_mocks(expected)

    with patch(
        "vllm.entrypoints.launchers.run_batch.aiohttp.ClientSession",
        return_value=mock_session,
    ):
        result = await download_bytes_from_url(
            url, allowed_media_domains=["example.com"]
        )
    assert result == expected


@pytest.mark.asyncio
async def test_download_bytes_no_allowlist_permits_any_domain():
    """Without an allowlist all HTTP URLs must be attempted (backward compat)."""
    url = "https://any-domain.example.org/file.wav"
    expected = b"some-data"
    mock_session = _make_aiohttp_mocks(expected)

    with patch(
        "vllm.entrypoints.launchers.run_batch.aiohttp.ClientSession",
        return_value=mock_session,
    ):
        result = await download_bytes_from_url(url, allowed_media_domains=None)
    assert result == expected


@pytest.mark.asyncio
async def test_download_bytes_empty_allowlist_denies_all():
    """An empty allowlist must deny all HTTP URLs (least privilege)."""
    url = "https://any-domain.example.org/file.wav"
    with pytest.raises(VLLMValidationError, match="allowed domains"):
        await download_bytes_from_url(url, allowed_media_domains=[])


@pytest.mark.asyncio
async def test_download_bytes_unsupported_scheme():
    """Unsupported URL schemes must be rejected regardless of allowlist."""
    with pytest.raises(VLLMValidationError, match="Unsupported URL scheme"):
        await download_bytes_from_url("ftp://example.com/file.wav")

    with pytest.raises(VLLMValidationError, match="Unsupported URL scheme"):
        await download_bytes_from_url(
            "ftp://example.com/file.wav",
            allowed_media_domains=["example.com"],
        )


@pytest.mark.asyncio
async def test_download_bytes_backslash_bypass():
    """Backslash-@ URL confusion must not bypass the allowlist.

    urllib3.parse_url() and aiohttp/yarl disagree on backslash-before-@.
    The fix normalizes through urllib3 before handing to aiohttp.
    """
    bypass_url = "http://allowed.example.com\\@evil.internal/secret"
    with pytest.raises(VLLMValidationError, match="allowed domains"):
        await download_bytes_from_url(
            bypass_url, allowed_media_domains=["evil.internal"]
        )


@pytest.mark.asyncio
async def test_transcription_wrapper_rejects_oversized_data_url_before_decode(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(envs, "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", 1)
    handler = AsyncMock()
    wrapped_handler = make_transcription_wrapper(is_translation=False)(handler)
    request = BatchTranscriptionRequest.model_validate(
        {
            "model": SPEECH_LARGE_MODEL_NAME,
            "file_url": f"data:audio/wav;base64,{_OVERSIZED_BASE64_AUDIO}",
            "response_format": "json",
        }
    )

    with patch("vllm.entrypoints.launchers.run_batch.base64.b64decode") as decode:
        response = await wrapped_handler(request)

    assert isinstance(response, ErrorResponse)
    assert "Maximum file size exceeded" in response.error.message
    decode.assert_not_called()
    handler.assert_not_awaited()


@pytest.mark.asyncio
async def test_download_bytes_allows_http_body_at_audio_limit(
    monkeypatch: pytest.MonkeyPatch,
    batch_http_server: _BatchHTTPServer,
):
    monkeypatch.setattr(envs, "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", 1)
    connection = HTTPConnection()
    monkeypatch.setattr(
        "vllm.entrypoints.launchers.run_batch.global_http_connection",
        connection,
    )

    try:
        result = await download_bytes_from_url(
            _batch_http_url(batch_http_server, "/exact-limit")
        )
        assert result == _EXACT_LIMIT_AUDIO
    finally:
        await _close_async_connection(connection)


@pytest.mark.asyncio
async def test_transcription_wrapper_rejects_oversized_http_before_handler(
    monkeypatch: pytest.MonkeyPatch,
    batch_http_server: _BatchHTTPServer,
):
    monkeypatch.setattr(envs, "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", 1)
    connection = HTTPConnection()
    monkeypatch.setattr(
        "vllm.entrypoints.launchers.run_batch.global_http_connection",
        connection,
    )
    handler = AsyncMock()
    wrapped_handler = make_transcription_wrapper(is_translation=False)(handler)
    request = BatchTranscriptionRequest.model_validate(
        {
            "model": SPEECH_LARGE_MODEL_NAME,
            "file_url": _batch_http_url(batch_http_server, "/oversized-chunked"),
            "response_format": "json",
        }
    )

    try:
        response = await wrapped_handler(request)
    finally:
        await _close_async_connection(connection)

    assert isinstance(response, ErrorResponse)
    assert "Maximum file size exceeded" in response.error.message
    handler.assert_not_awaited()


# ---------------------------------------------------------------------------
# Unit tests for upload_data retry behavior
# ---------------------------------------------------------------------------


def _make_aiohttp_put_session(status: int = 200, body_text: str = ""):
    """Mock an aiohttp.ClientSession whose PUT returns the given status."""
    mock_resp = MagicMock()
    mock_resp.status = status
    mock_resp.text = AsyncMock(return_value=body_text)
    mock_resp.__aenter__ = AsyncMock(return_value=mock_resp)
    mock_resp.__aexit__ = AsyncMock(return_value=False)

    mock_session = MagicMock()
    mock_session.put = MagicMock(return_value=mock_resp)
    mock_session.__aenter__ = AsyncMock(return_value=mock_session)
    mock_session.__aexit__ = AsyncMock(return_value=False)
    return mock_session


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [200, 201, 204])
@pytest.mark.parametrize("from_file", [False, True])
async def test_upload_data_uploads_once_on_success(status, from_file, tmp_path):
    """Successful PUT responses must not retry either upload path."""
    session = _make_aiohttp_put_session(status=status)
    data_or_file = "payload"
    if from_file:
        path = tmp_path / "output.jsonl"
        path.write_text(data_or_file, encoding="utf-8")
        data_or_file = str(path)

    with (
        patch(
            "vllm.entrypoints.launchers.run_batch.aiohttp.ClientSession",
            return_value=session,
        ),
        patch(
            "vllm.entrypoints.launchers.run_batch.asyncio.sleep",
            new_callable=AsyncMock,
        ) as sleep,
    ):
        await upload_data(
            "https://example.com/output.jsonl", data_or_file, from_file=from_file
        )
    assert session.put.call_count == 1
    sleep.assert_not_awaited()


@pytest.mark.asyncio
async def test_upload_data_error_includes_awaited_response_body():
    """A failed upload must surface the awaited response body, not a coroutine."""
    session = _make_aiohttp_put_session(status=500, body_text="server-error-detail")
    with (
        patch(
            "vllm.entrypoints.launchers.run_batch.aiohttp.ClientSession",
            return_value=session,
        ),
        patch(
            "vllm.entrypoints.launchers.run_batch.asyncio.sleep",
            AsyncMock(),
        ),
        pytest.raises(Exception) as exc_info,
    ):
        await upload_data(
            "https://example.com/output.jsonl", "payload", from_file=False
        )
    message = str(exc_info.value)
    assert "server-error-detail" in message
    assert "coroutine" not in message


# ---------------------------------------------------------------------------
# Unit tests for streaming batch execution
# ---------------------------------------------------------------------------


def _write_batch(tmp_path, lines: list[str]):
    input_path = tmp_path / "input.jsonl"
    input_path.write_text("\n".join(lines) + "\n")
    return input_path


def _read_twice(f) -> tuple[str, str]:
    """Read a batch handle the way the two passes do, seeking back in between."""
    first = f.read()
    f.seek(0)
    return first, f.read()


def test_validate_batch_counts_requests(tmp_path):
    """Blank lines are skipped and do not count towards the request total."""
    input_path = _write_batch(tmp_path, [INPUT_BATCH, ""])

    with open(input_path, encoding="utf-8") as f:
        assert validate_batch(f) == len(INPUT_BATCH.strip().split("\n"))


def test_validate_batch_rejects_malformed_request(tmp_path):
    """A malformed request is rejected before any of the batch is run."""
    input_path = _write_batch(tmp_path, [INPUT_BATCH, INVALID_INPUT_BATCH])
    bad_line = len(INPUT_BATCH.strip().split("\n")) + 1

    with (
        open(input_path, encoding="utf-8") as f,
        pytest.raises(ValueError, match=f"line {bad_line}:"),
    ):
        validate_batch(f)


@pytest.mark.asyncio
async def test_open_batch_input_keeps_a_carriage_return_inside_a_line(tmp_path):
    """A bare carriage return is JSON whitespace, not a line break."""
    request = INPUT_BATCH.strip().split("\n")[0].replace(", ", ",\r", 1)
    assert "\r" in request
    input_path = tmp_path / "input.jsonl"
    input_path.write_bytes((request + "\n").encode())

    async with open_batch_input(str(input_path), None) as f:
        assert validate_batch(f) == 1


@pytest.mark.asyncio
async def test_batch_output_writer_persists_before_completion(tmp_path):
    """Responses reach disk while the batch is still running."""
    output_path = tmp_path / "output.jsonl"

    async with batch_output_writer(str(output_path), None) as output_file:
        print("first", file=output_file)
        output_file.flush()
        assert output_path.read_text() == "first\n"
        print("second", file=output_file)

    assert output_path.read_text() == "first\nsecond\n"


def test_is_same_local_file_detects_aliases(tmp_path):
    """Aliases of one regular file must be recognised, and only those."""
    target = tmp_path / "batch.jsonl"
    target.write_text("{}\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    assert is_same_local_file(str(target), str(target))
    assert is_same_local_file(str(target), str(link))
    assert is_same_local_file(str(target), f"{tmp_path}/./batch.jsonl")

    assert not is_same_local_file(str(target), str(other))
    assert not is_same_local_file(str(target), "https://example.com/output.jsonl")
    assert not is_same_local_file(str(target), str(tmp_path / "missing.jsonl"))
    assert not is_same_local_file(str(fifo), str(fifo))


@pytest.mark.asyncio
async def test_dispatch_batch_counts_error_responses_as_completed(tmp_path):
    """Synthesized error responses advance progress like any other response."""
    input_path = _write_batch(tmp_path, [INPUT_BATCH])
    output_path = tmp_path / "output.jsonl"
    num_requests = len(INPUT_BATCH.strip().split("\n"))

    tracker = BatchProgressTracker()
    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
        tracker.pbar(total=num_requests) as pbar,
    ):
        # An empty registry makes every response a synthesized error.
        await dispatch_batch(input_file, output_file, {}, tracker, max_inflight=2)
    assert pbar.n == num_requests


@pytest.mark.asyncio
async def test_open_batch_input_reads_a_regular_file_in_place(tmp_path):
    """An ordinary file is not copied; it is seekable, so both passes reread it."""
    input_path = _write_batch(tmp_path, [INPUT_BATCH])

    async with open_batch_input(str(input_path), None) as f:
        assert f.name == str(input_path)
        assert _read_twice(f) == (INPUT_BATCH + "\n", INPUT_BATCH + "\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("use_tmp_dir", [False, True])
async def test_open_batch_input_stages_a_stream(tmp_path, use_tmp_dir):
    """A non-seekable input must be staged so the batch can be read twice."""
    payload = '{"custom_id": "request-1"}\n'
    read_fd, write_fd = os.pipe()
    os.write(write_fd, payload.encode())
    os.close(write_fd)

    tmp_dir = str(tmp_path) if use_tmp_dir else None
    async with open_batch_input(f"/dev/fd/{read_fd}", tmp_dir) as f:
        assert _read_twice(f) == (payload, payload)
        staged_files = list(tmp_path.iterdir())
        assert bool(staged_files) == use_tmp_dir
    assert not list(tmp_path.iterdir()), "staged copy must be removed"


@pytest.mark.asyncio
async def test_open_batch_input_downloads_a_url(tmp_path, monkeypatch):
    """A URL body is downloaded through the shared HTTP client to a file.

    The download needs a timeout, or a stalled server hangs the run forever.
    """
    payload = "\n".join(INPUT_BATCH.strip().split("\n")[:2]) + "\n"
    downloads = []

    async def fake_download_file(url, save_path, *, timeout, chunk_size):
        downloads.append((url, save_path, timeout))
        save_path.write_text(payload)
        return save_path

    monkeypatch.setattr(
        run_batch_module.global_http_connection,
        "async_download_file",
        fake_download_file,
    )

    async with open_batch_input("https://example.com/batch.jsonl", str(tmp_path)) as f:
        assert validate_batch(f) == 2
        f.seek(0)
        assert validate_batch(f) == 2

    ((url, save_path, timeout),) = downloads
    assert url == "https://example.com/batch.jsonl"
    assert timeout is not None and timeout > 0
    assert save_path.is_relative_to(tmp_path)
    assert not save_path.exists(), "downloaded copy must be removed"


def test_unwritable_output_file_is_rejected_before_engine_start(tmp_path):
    """A bad output path fails argument validation, not after the model loads."""

    def args(output_file):
        return SimpleNamespace(
            max_inflight=None,
            input_file=str(tmp_path / "input.jsonl"),
            output_file=output_file,
            structured_outputs_config=SimpleNamespace(reasoning_parser=None),
        )

    with pytest.raises(ValueError, match="does not exist"):
        validate_run_batch_args(args(str(tmp_path / "missing" / "out.jsonl")))
    with pytest.raises(ValueError, match="is a directory"):
        validate_run_batch_args(args(str(tmp_path)))

    validate_run_batch_args(args(str(tmp_path / "out.jsonl")))
    validate_run_batch_args(args("https://example.com/out.jsonl"))
    validate_run_batch_args(args("HTTPS://example.com/out.jsonl"))


def test_admission_limits_are_ignored(caplog_vllm):
    """The engine must not answer batch requests with 503 rows."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["-i", "in.jsonl", "-o", "out.jsonl", "--max-num-queued-reqs", "8"]
        + ["--max-num-queued-tokens", "100"]
    )
    ignore_admission_limits(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    assert engine_args.max_num_queued_reqs is None
    assert engine_args.max_num_queued_tokens is None
    assert "Ignoring --max-num-queued-reqs and --max-num-queued-tokens" in (
        caplog_vllm.text
    )


def _chat_requests(n: int) -> list[dict]:
    return [
        {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions"}
        for i in range(n)
    ]


def _response(request_json: str) -> BatchRequestOutput:
    return BatchRequestOutput(
        id="vllm-test",
        custom_id=json.loads(request_json)["custom_id"],
        response=None,
        error=None,
    )


@pytest.mark.asyncio
async def test_dispatch_batch_respects_max_inflight(tmp_path, monkeypatch):
    """No more than max_inflight requests may be alive at once."""
    requests = _chat_requests(50)
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in requests])
    output_path = tmp_path / "output.jsonl"

    live = 0
    peak = 0

    async def fake_run_one_request(request_json, endpoint_registry):
        nonlocal live, peak
        live += 1
        peak = max(peak, live)
        await asyncio.sleep(0)
        live -= 1
        return _response(request_json)

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    max_inflight = 8
    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
    ):
        await dispatch_batch(
            input_file, output_file, {}, BatchProgressTracker(), max_inflight
        )

    assert peak <= max_inflight
    assert len(output_path.read_text().strip().split("\n")) == len(requests)


@pytest.mark.asyncio
@pytest.mark.parametrize("use_tmp_dir", [False, True])
async def test_batch_output_writer_uploads_url_output_once(
    tmp_path, monkeypatch, use_tmp_dir
):
    """A URL destination is staged and uploaded after the batch."""
    uploaded = {}

    async def fake_upload_data(output_url, data_or_file, from_file):
        uploaded["url"] = output_url
        uploaded["from_file"] = from_file
        if from_file:
            with open(data_or_file, encoding="utf-8") as f:
                uploaded["content"] = f.read()
        else:
            uploaded["content"] = data_or_file

    monkeypatch.setattr(run_batch_module, "upload_data", fake_upload_data)

    tmp_dir = str(tmp_path) if use_tmp_dir else None
    async with batch_output_writer(
        "https://example.com/output.jsonl", tmp_dir
    ) as output_file:
        print("first", file=output_file)
        print("second", file=output_file)
        assert not uploaded, "upload must wait until the batch finishes"
        assert bool(list(tmp_path.iterdir())) == use_tmp_dir

    # The in-memory path uploads stripped bytes, as it always has.
    assert uploaded == {
        "url": "https://example.com/output.jsonl",
        "from_file": use_tmp_dir,
        "content": "first\nsecond\n" if use_tmp_dir else b"first\nsecond",
    }
    assert not list(tmp_path.iterdir()), "staged copy must be removed"


@pytest.mark.asyncio
async def test_dispatch_batch_writes_responses_in_input_order(tmp_path, monkeypatch):
    """Responses follow the input order even when later requests finish first."""
    requests = _chat_requests(20)
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in requests])
    output_path = tmp_path / "output.jsonl"

    async def fake_run_one_request(request_json, endpoint_registry):
        index = int(json.loads(request_json)["custom_id"].split("-")[1])
        await asyncio.sleep((len(requests) - index) * 0.001)
        return _response(request_json)

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
    ):
        await dispatch_batch(
            input_file, output_file, {}, BatchProgressTracker(), max_inflight=8
        )

    written = [
        BatchRequestOutput.model_validate_json(line).custom_id
        for line in output_path.read_text().strip().split("\n")
    ]
    assert written == [r["custom_id"] for r in requests]


@pytest.mark.asyncio
async def test_dispatch_batch_holds_the_window_behind_a_stalled_request(
    tmp_path, monkeypatch
):
    """A slow first request blocks writes and caps dispatch at the window."""
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in _chat_requests(20)])
    output_path = tmp_path / "output.jsonl"
    release_head = asyncio.Event()
    dispatched: list[str] = []

    async def fake_run_one_request(request_json, endpoint_registry):
        dispatched.append(json.loads(request_json)["custom_id"])
        if len(dispatched) == 1:
            await release_head.wait()
        return _response(request_json)

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
    ):
        run = asyncio.create_task(
            dispatch_batch(
                input_file,
                output_file,
                {},
                BatchProgressTracker(),
                max_inflight=2,
                window=6,
            )
        )
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(dispatched) == 6
        assert output_path.read_text() == ""

        release_head.set()
        await run

    assert len(output_path.read_text().strip().split("\n")) == 20


@pytest.mark.asyncio
async def test_dispatch_batch_cancels_inflight_on_failure(tmp_path, monkeypatch):
    """An aborted batch leaves nothing running and writes nothing it cancelled."""
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in _chat_requests(8)])
    output_path = tmp_path / "output.jsonl"

    started: list[asyncio.Task | None] = []

    async def fake_run_one_request(request_json, endpoint_registry):
        started.append(asyncio.current_task())
        if len(started) == 1:
            raise RuntimeError("request blew up")
        try:
            await asyncio.Event().wait()  # never finishes on its own
        except asyncio.CancelledError:
            # The serving handlers answer a cancellation instead of raising.
            return _response(request_json)

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
        pytest.raises(RuntimeError, match="request blew up"),
    ):
        await dispatch_batch(
            input_file, output_file, {}, BatchProgressTracker(), max_inflight=4
        )

    await asyncio.sleep(0)
    assert len(started) == 4
    assert all(task is not None and task.done() for task in started), (
        "requests were left in flight"
    )
    assert output_path.read_text() == ""


@pytest.mark.asyncio
async def test_dispatch_batch_keeps_responses_written_before_a_failure(
    tmp_path, monkeypatch
):
    """A failure must not discard responses that had already finished."""
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in _chat_requests(3)])
    output_path = tmp_path / "output.jsonl"

    async def fake_run_one_request(request_json, endpoint_registry):
        if json.loads(request_json)["custom_id"] == "request-1":
            raise RuntimeError("request blew up")
        return _response(request_json)

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
        pytest.raises(RuntimeError, match="request blew up"),
    ):
        await dispatch_batch(
            input_file, output_file, {}, BatchProgressTracker(), max_inflight=1
        )

    written = [
        BatchRequestOutput.model_validate_json(line).custom_id
        for line in output_path.read_text().strip().split("\n")
    ]
    assert written == ["request-0"]


@pytest.mark.asyncio
async def test_dispatch_batch_stops_writing_once_the_engine_dies(tmp_path, monkeypatch):
    """Error rows from a dead engine must not extend the resumable prefix."""
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in _chat_requests(8)])
    output_path = tmp_path / "output.jsonl"
    engine = SimpleNamespace(errored=False, dead_error=EngineDeadError())

    async def fake_run_one_request(request_json, endpoint_registry):
        if json.loads(request_json)["custom_id"] != "request-1":
            return _response(request_json)
        # Later requests finish and wait behind this one before the engine dies.
        await asyncio.sleep(0.01)
        engine.errored = True
        response = _response(request_json)
        response.error = "engine dead"
        return response

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
        pytest.raises(EngineDeadError),
    ):
        await dispatch_batch(
            input_file,
            output_file,
            {},
            BatchProgressTracker(),
            max_inflight=4,
            engine_client=engine,
        )

    written = [
        BatchRequestOutput.model_validate_json(line).custom_id
        for line in output_path.read_text().strip().split("\n")
    ]
    assert written == ["request-0"]


@pytest.mark.asyncio
async def test_dispatch_batch_keeps_a_response_finished_as_the_engine_dies(
    tmp_path, monkeypatch
):
    """A complete response is still written if the engine dies after it."""
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in _chat_requests(2)])
    output_path = tmp_path / "output.jsonl"
    engine = SimpleNamespace(errored=False, dead_error=EngineDeadError())

    async def fake_run_one_request(request_json, endpoint_registry):
        if json.loads(request_json)["custom_id"] == "request-1":
            engine.errored = True
        return _response(request_json)

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
    ):
        await dispatch_batch(
            input_file,
            output_file,
            {},
            BatchProgressTracker(),
            max_inflight=1,
            engine_client=engine,
        )

    assert len(output_path.read_text().strip().split("\n")) == 2


@pytest.mark.asyncio
async def test_dispatch_batch_reports_a_cancelled_request(tmp_path, monkeypatch):
    """A request cancelled from inside the engine fails the batch with an error."""
    input_path = _write_batch(tmp_path, [json.dumps(r) for r in _chat_requests(2)])

    async def fake_run_one_request(request_json, endpoint_registry):
        raise asyncio.CancelledError()

    monkeypatch.setattr(run_batch_module, "run_one_request", fake_run_one_request)

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(tmp_path / "output.jsonl", "w", encoding="utf-8") as output_file,
        pytest.raises(RuntimeError, match="cancelled"),
    ):
        await dispatch_batch(
            input_file, output_file, {}, BatchProgressTracker(), max_inflight=4
        )


@pytest.mark.asyncio
async def test_unsupported_url_error_lists_registry_endpoints(tmp_path):
    """The error names the endpoints the registry actually serves."""
    registry = {
        "widgets": {
            "url": "/v1/widgets",
            "handler_getter": lambda: None,
            "wrapper_fn": None,
        }
    }
    request = json.loads(INPUT_BATCH.strip().split("\n")[0])
    request["url"] = "/v1/unsupported"
    input_path = _write_batch(tmp_path, [json.dumps(request)])
    output_path = tmp_path / "output.jsonl"

    with (
        open(input_path, encoding="utf-8") as input_file,
        open(output_path, "w", encoding="utf-8") as output_file,
    ):
        await dispatch_batch(
            input_file, output_file, registry, BatchProgressTracker(), 4
        )

    error = BatchRequestOutput.model_validate_json(
        output_path.read_text().strip()
    ).error
    assert "/v1/unsupported" in error
    assert "/v1/widgets" in error


def test_url_matches_accepts_any_prefix_for_unversioned_endpoints():
    """An endpoint with no version of its own is served under any prefix."""
    for url in ("/score", "/v1/score", "/api/v1/score", "/foo/score"):
        assert url_matches("/score", url), url
    for url in ("/scorecard", "/score/", "/v1/scores"):
        assert not url_matches("/score", url), url

    # An endpoint that already names its version matches only that version.
    assert url_matches("/v1/embeddings", "/v1/embeddings")
    for url in ("/v2/embeddings", "/api/v1/embeddings"):
        assert not url_matches("/v1/embeddings", url), url
