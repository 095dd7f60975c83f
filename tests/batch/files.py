"""Batch files of tests."""

from __future__ import annotations

import json
from pathlib import Path


def request(number: int, text: str = "", **fields) -> dict:
    body = {"messages": [{"role": "user", "content": text or f"question {number}"}]}
    line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {**line, **fields}


def write(path: Path, requests) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in requests))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
