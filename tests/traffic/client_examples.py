"""The programs of examples/clients: which server each runs against, and what it must print."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.traffic.server_process import ROOT, RunningServer, free_port, server

FOLDER = ROOT / "examples" / "clients"
TEMPLATE = str(ROOT / "examples" / "templates" / "qwen2_5_vl_hermes.jinja")
FLAGS = {
    "demo": ("--chat-template", TEMPLATE, "--dtype", "float32", "--kv-cache-memory-bytes", "128MiB"),
    "pooling": ("--runner", "pooling", "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB"),
}
"""Servers of the demo checkpoint. ``scripted`` is the third: its model calls tools without being made to."""
SECONDS = 300
"""The longest that an example may take, with the import of its library on a busy machine."""
SAYS = r"answer: (I am .+|I'm .+)\nstream: \1\n"
SEES = r"picture: .*circle"
CALLS = r"call: get_weather \{'city': 'Paris'\}\nthen: It is 21 degrees and clear in Paris\."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
USER = [{"role": "user", "content": "Hi"}]
NEEDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "schema": ("/v1/chat/completions", {
        "messages": USER, "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }),
    "strict": ("/v1/chat/completions", {
        "messages": USER, "max_tokens": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
    }),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 1}),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
}  # fmt: skip
"""Requests that tell whether a server has what an example needs."""


class Example(NamedTuple):
    """A program, the servers that it runs against with what it must print there, and what they must have."""

    shows: Mapping[str, str]
    library: str
    needs: str = ""


SCRIPTED = r"answer: I answer by a script\.\nstream: I answer by a script\.\n"
EXAMPLES = {
    "openai_chat": Example({
        "demo": SAYS + r"(\d+) tokens; at once: \2\n" + SEES + r".*\nit took \d+ of \d+ tokens"
    }, "openai"),
    "openai_tools": Example({
        "scripted": r'finish_reason: tool_calls\ncall: get_weather {"city": "Paris"}\n'
        r'answer: It is 21 degrees.*\nstreamed call: get_weather {"city": "Paris"}'
    }, "openai"),
    "openai_required_tool": Example({
        "demo": r"call: report (circle|square|triangle) tool_calls\ncall: report \1 stop"
    }, "openai", "schema"),
    "openai_json_schema": Example({
        "demo": r"parsed: shape='\w+' colour='(red|green|blue)' stop\nan object: (dict|cut off)"
    }, "openai", "schema"),
    "openai_responses": Example({
        "demo": SAYS + r"events: response.created ... response.completed\n" + SEES,
        "scripted": SCRIPTED + r'(?s:.*)call: get_weather {"city": "Paris"}\nthen: It is 21 degrees',
    }, "openai", "responses"),
    "openai_embeddings": Example({
        "pooling": r"vectors: 3 of (\d+) numbers\nequal: True\ncosine: itself 1\.000, another wording -?[01]\.\d+"
    }, "openai", "embeddings"),
    "anthropic_messages": Example({
        "demo": SAYS + r"stop_reason: end_turn\n" + SEES + r".*\ntokens: (\d+) \2$"
    }, "anthropic", "messages"),
    "anthropic_tools": Example({
        "scripted": r"stop_reason: tool_use\ncall: get_weather {'city': 'Paris'}\nanswer: It is 21 degrees.*\n"
        r"streamed call: get_weather {'city': 'Paris'}"
    }, "anthropic", "messages"),
    "langchain_openai_chat": Example({"demo": SAYS + SEES, "scripted": SCRIPTED + r".*\n" + CALLS}, "langchain_openai"),
    "langchain_openai_structured": Example({
        "demo": r"json_schema: Finding shape='\w+' colour='\w+'\nfunction_calling: Finding shape='\w+' colour='\w+'"
    }, "langchain_openai", "schema"),
    "langchain_openai_embeddings": Example({
        "pooling": r"vectors: 3 of \d+ numbers\nnearest: The circle is red\."
    }, "langchain_openai", "embeddings"),
    "langchain_anthropic_chat": Example({
        "demo": SAYS + SEES, "scripted": SCRIPTED + r".*\n" + CALLS
    }, "langchain_anthropic", "messages"),
    "llama_index_chat": Example({
        "demo": SAYS + SEES,
        "scripted": SCRIPTED + r".*\ncall: get_weather {'city': 'Paris'} -> 21 degrees and clear in Paris",
    }, "llama_index"),
    "litellm_chat": Example({
        "demo": SAYS + SEES, "scripted": SCRIPTED + r'.*\ncall: get_weather {"city": "Paris"}'
    }, "litellm"),
    "agents_tool": Example({
        "scripted": r"item: tool_call_item\nitem: tool_call_output_item\nitem: message_output_item\nanswer: It is 21"
    }, "agents", "strict"),
}  # fmt: skip


@contextlib.contextmanager
def scripted(folder: Path, delay: float = 0.0) -> Iterator[RunningServer]:
    """``tests.traffic.scripted_server``, ready; ended by its pid."""
    port = free_port()
    log = folder / f"scripted-{port}.log"
    command = [sys.executable, "-m", "tests.traffic.scripted_server", "--port", str(port), "--delay", str(delay)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    running = RunningServer(process, f"http://127.0.0.1:{port}", log)
    try:
        running.wait()
        yield running
    finally:
        running.http.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def started(kind: str, folder: Path) -> Iterator[RunningServer]:
    """The server of that kind, ready."""
    with scripted(folder) if kind == "scripted" else server(folder, *FLAGS[kind]) as running:
        yield running


def lacking(running: RunningServer, needs: str) -> str:
    """What the server says where it does not have what an example needs; "" where it has it."""
    if not needs:
        return ""
    path, body = NEEDS[needs]
    answer = running.http.post(path, json=dict(body))
    absent = answer.status_code == 404 or (answer.status_code == 400 and "not supported" in answer.text)
    return f"{path} answered {answer.status_code}: {answer.text[:160]}" if absent else ""


class Ran(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    error: str
    seconds: float


def ran(python: Path, name: str, base_url: str) -> Ran:
    """Runs an example by the Python that has its library. Nothing but the server is to be reached."""
    kept = {k: v for k, v in os.environ.items() if not re.search(r"(?i)proxy|OPENAI|ANTHROPIC|PYTHONPATH", k)}
    env = kept | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none", "LANGSMITH_TRACING": "false"}
    begun = time.monotonic()
    done = subprocess.run(
        [python, f"{name}.py"], cwd=FOLDER, env=env, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)
