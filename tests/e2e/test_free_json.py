"""The demo ends the JSON that it is asked for: strings close, and objects end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.server_process import server
from trencadis.assets import demo_path

TOPICS = (
    "Describe a red circle as JSON.", "Return JSON with name and age.", "Write an invoice as JSON.", "json",
    "Tell me a joke in JSON.", "Extract the person: Anna is 31 and lives in Rome.", "List three colours as JSON.",
)  # fmt: skip
JOKE = {
    "type": "object", "required": ["setup", "punchline"],
    "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}, "rating": {"type": "integer"}},
}  # fmt: skip
FORMS: tuple[dict[str, Any], ...] = (
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "joke", "schema": JOKE}},
)  # fmt: skip


def make_body(number: int) -> dict[str, Any]:
    """Greedy and sampled, free and with a schema."""
    body = {"messages": [{"role": "user", "content": TOPICS[number % len(TOPICS)]}], "max_tokens": 300,
            "response_format": FORMS[number // len(TOPICS) % 2]}  # fmt: skip
    return body | ({"temperature": 1.0, "seed": number} if number % 2 else {})


@pytest.mark.long
def test_a_hundred_answers_parse(tmp_path: Path) -> None:
    with server(tmp_path, "--model", str(demo_path()), "--threads", "1") as running:

        def ask(number: int) -> str:
            answer = running.http.post("/v1/chat/completions", json=make_body(number)).json()
            return str(answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(4) as pool:
            for text in pool.map(ask, range(100)):
                assert json.loads(text) is not None
