"""schemathesis against what /openapi.json says: no 5xx, no answer that it does not describe, none that does not come.

It has an environment of its own, which the Makefile makes; it reaches the server over HTTP.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.client_examples import scripted
from tests.traffic.server_process import ROOT

HERE = Path(__file__).resolve().parent
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
"""Not those that want every valid body to be accepted and no other: fields contradict each other in ways that a schema
does not say, and unknown ones are allowed."""
HANGS = 30
"""Seconds without an answer."""


@pytest.fixture(scope="module")
def program() -> Path:
    """schemathesis."""
    folder = Path(os.environ.get("FUZZ", ROOT / ".fuzz"))
    made = subprocess.run(["make", f"FUZZ={folder}", f"{folder}/.installed"], cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"schemathesis cannot be installed here: {made.stderr[-300:]}")
    return folder / "bin" / "schemathesis"


def bodies(url: str, http: Any) -> int:
    """Number of routes that take a body."""
    paths = http.get("/openapi.json").json()["paths"]
    return sum("requestBody" in operation for methods in paths.values() for operation in methods.values())


@pytest.mark.long
@pytest.mark.parametrize("cases", [300, 20_000])
def test_answers_are_as_described(cases: int, program: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with scripted(tmp_path) as running:
        routes = bodies(running.url, running.http)
        phases = "examples,fuzzing" if cases < 1000 else "examples,coverage,fuzzing"
        command = [
            str(program), "run", f"{running.url}/openapi.json", "--checks", ",".join(CHECKS),
            "-n", str(cases // routes + 1), "--phases", phases, "--seed", "1", "--continue-on-failure",
            "--request-timeout", str(HANGS), "--suppress-health-check", "all", "--generation-database", "none",
            "--report", "json", "--report-json-path", str(report), "--no-color",
        ]  # fmt: skip
        env = os.environ | {"SCHEMATHESIS_HOOKS": "tests.schema.fuzz_hooks", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert running.process.poll() is None
        again = running.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        log = running.text()
    found = json.loads(report.read_text())
    rates = {route: rate.get("fuzzing", {}) for route, rate in found["valid_rates"].items()}
    print(f"\n{found['test_cases']}\n" + "\n".join(f"{route}: {rate}" for route, rate in rates.items()))
    assert done.returncode == 0 and not found["failures"] and not found["errors"], done.stdout[-6000:]
    assert found["test_cases"]["generated"] >= cases and again.status_code == 200
    assert "Traceback" not in log, log[-3000:]
    posts = [rate for route, rate in rates.items() if route.startswith("POST /v1/")]
    assert cases < 1000 or (posts and all(rate["accepted"] for rate in posts)), "some route refused every body"
