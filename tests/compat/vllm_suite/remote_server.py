"""``RemoteOpenAIServer`` of vLLM's tests, which starts this server instead of theirs.

It stands in the place of their module ``tests.utils``. A server that refuses a flag skips the tests that ask for it,
with the line that it printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from .stub_package import find_open_port, make_stand_in

VLLM_PATH = Path(os.environ.get("VLLM_SUITE", ".")).resolve()
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROOM = ["--kv-cache-memory-bytes", "128MiB", "--threads", "1", "--allowed-media-domains", "127.0.0.1"]
MOST_TOKENS = "3000"
"""Longest answer of a model that has not learned to end one, unless a test says otherwise."""
SHORT_ANSWERS = ["--override-generation-config", '{"max_new_tokens": 1000}']
"""Bounds the answers of requests without a limit, where a test gives its server a long context."""
START = 120.0
"""Seconds until a server must answer."""


HUB_NAME = re.compile(r"(?:[\w.-]+(?:/[\w.-]+)?=)?([\w-][\w.-]*/[\w-][\w.-]*)")
"""owner/name, also as the path of an adapter with a name."""
LONG_ANSWERS = ("test_request_cancellation",)
"""Tests whose requests say how long the answers are, which may be longer than ``SHORT_ANSWERS``."""


def find_checkpoint(name: str) -> str:
    """Returns the folder of the checkpoint that stands for a model of the hub."""
    if os.path.isdir(name):
        return name
    listed = json.loads((_models() / "models.json").read_text())
    kind = next((kind for part, kind in listed["names"].items() if part in name), "demo")
    return str(listed["kinds"][kind])


def _models() -> Path:
    return Path(os.environ["VLLM_SUITE_MODELS"])


def link_checkpoint(name: str) -> str:
    """Makes ``hub/OWNER/NAME`` a link to the checkpoint that stands for a model, and returns the name.

    A server that is started in the folder ``hub`` finds the model by its name, which /v1/models then shows as its root.
    """
    link = _models() / "hub" / name
    if not os.path.isdir(name) and not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(find_checkpoint(name))
    return name


class HubFiles:
    """Returns folders of this machine in place of the hub's; a test that needs a single file is skipped."""

    def snapshot_download(self, repo_id: str, *_: Any, **__: Any) -> str:
        """Returns the folder of the model or adapter that stands for one of the hub."""
        return find_checkpoint(repo_id)

    def hf_hub_download(self, *_: Any, **__: Any) -> str:
        """Skips the test."""
        pytest.skip("reads a file of the hub")


class RemoteOpenAIServer:
    """A server of this project with the command line of one of vLLM's.

    Raises:
        pytest.skip.Exception: it refuses the command line; the reason is what it printed.
    """

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        given = [str(one) for one in vllm_serve_args]
        self.show_hidden_metrics = any(word.startswith("--show-hidden-metrics-for-version") for word in given)
        self.uds = given[given.index("--uds") + 1] if "--uds" in given else None
        self.host = given[given.index("--host") + 1] if "--host" in given else "127.0.0.1"
        if "--port" in given:
            self.port = int(given[given.index("--port") + 1])
        else:
            self.port = find_open_port()
            given += [] if self.uds else ["--port", str(self.port)]
        if not {"--served-model-name", "--served_model_name"} & set(given):
            given += ["--served-model-name", model]
        if not {"--max-model-len", "--max_model_len"} & set(given):
            given += ["--max-model-len", MOST_TOKENS]
        if override_hf_configs is not None:
            given += ["--hf-overrides", json.dumps(override_hf_configs)]
        generates = Path(find_checkpoint(model)).name == "demo" and "--runner" not in given
        bounded = generates and SHORT_ANSWERS[0] not in given
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        given += SHORT_ANSWERS if bounded and not any(name in test for name in LONG_ANSWERS) else []
        given += [] if seed is None else ["--seed", str(seed)]
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (env_dict or {})
        if "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environ:
            given += ["--allowed-lora-path", "/"]
        for word in given:
            if (found := HUB_NAME.fullmatch(word)) is not None:
                link_checkpoint(found[1])
        command = [os.environ["TRENCADIS_PYTHON"], "-m", "trencadis", "serve", link_checkpoint(model), *given, *ROOM]
        self._log = Path(tempfile.mkstemp(suffix=".log")[1])
        with self._log.open("wb") as out:
            self.proc = subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=_models() / "hub")
        try:
            self._wait(START)
        except BaseException:
            self._stop()
            raise

    def _wait(self, seconds: float) -> None:
        import httpx

        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        end = time.monotonic() + seconds
        with httpx.Client(transport=transport, trust_env=False) as client:
            while time.monotonic() < end:
                if self.proc.poll() is not None:
                    lines = self._log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
                    pytest.skip(f"does not start: {lines[-1]}")
                try:
                    if client.get(self.url_for("health"), timeout=5).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                time.sleep(0.2)
        pytest.fail(f"no answer within {seconds} s: {self._log.read_text(errors='replace')[-2000:]}")

    def _stop(self) -> None:
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
            try:
                self.proc.wait(30)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        """The address without a path."""
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """The address of a path."""
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def get_client(self, **kwargs: Any) -> Any:
        """A client of OpenAI's library."""
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client(self, **kwargs: Any) -> Any:
        """An asynchronous client of OpenAI's library."""
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_client_anthropic(self, **kwargs: Any) -> Any:
        """A client of Anthropic's library."""
        import anthropic

        return anthropic.Anthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        """An asynchronous client of Anthropic's library."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)


RemoteVLLMServer = RemoteOpenAIServer


class RemoteLaunchRenderServer:
    """Theirs renders prompts without an engine, for which this project has no server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pytest.skip("needs `vllm launch render`, a server without an engine")


class RemoteOpenAIServerCustom:
    """Theirs runs a function of vLLM in a process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pytest.skip("starts a server by vLLM's own code")


def create_new_process_for_each_test(method: str | None = None) -> Any:
    """Returns a decorator that changes nothing."""
    return lambda function: function


def multi_gpu_test(*args: Any, **kwargs: Any) -> Any:
    """Returns a mark that skips: there are no cards."""
    return pytest.mark.skip(reason="needs cards")


multi_gpu_marks = multi_gpu_test
large_gpu_mark = large_gpu_test = multi_gpu_only = multi_gpu_test


def requires_fp8(function: Any) -> Any:
    """Returns the function: the CPU has these weights."""
    return function


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return make_stand_in(f"tests.utils.{name}")
