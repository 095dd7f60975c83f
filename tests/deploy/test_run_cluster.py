"""``deploy/run_cluster.sh``: what it asks of docker, and what it refuses; an echo stands in for docker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "run_cluster.sh"


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", SCRIPT, *words],
        env={"PATH": os.environ["PATH"], "DOCKER": "echo", **env},
        capture_output=True,
        text=True,
    )


def test_the_head_and_a_worker(tmp_path: Path) -> None:
    """The line that vLLM's guides give."""
    cache = str(tmp_path)
    head = run(
        "trencadis:gaudi", "10.0.0.1", "--head", cache, "--runtime=habana", "-e", "HABANA_VISIBLE_DEVICES=all"
    ).stdout
    assert head.endswith("trencadis:gaudi -c exec ray start --head --block --port=6379 --node-ip-address=10.0.0.1 "
                         "--include-dashboard=false\n")  # fmt: skip
    assert "--runtime=habana -e HABANA_VISIBLE_DEVICES=all trencadis:gaudi" in head and "--network host" in head
    assert f"-v {cache}:/root/.cache/huggingface" in head and "RAY_AUTH" not in head
    worker = run("i", "10.0.0.1", "--worker", cache, VLLM_HOST_IP="10.0.0.2").stdout
    assert worker.endswith("i -c exec ray start --block --address=10.0.0.1:6379 --node-ip-address=10.0.0.2\n")


def test_a_token_is_mounted_and_not_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-token")
    said = run("i", "10.0.0.1", "--head", str(tmp_path), RAY_AUTH_TOKEN_PATH=str(token))
    assert f"-v {token}:/run/ray-token:ro" in said.stdout and "RAY_AUTH_MODE=token" in said.stdout
    assert "a-secret-token" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("i", "10.0.0.1", "--head"), "usage: run_cluster.sh IMAGE HEAD_IP --head|--worker HF_HOME"),
        (("i", "10.0.0.1", "--both", "/"), "usage: run_cluster.sh"),
        (("i", "10.0.0.1; true", "--head", "/"), "10.0.0.1; true is no IP address"),
        (("i", "10.0.0.1", "--head", "/no/such/folder"), "there is no folder /no/such/folder"),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr and not done.stdout
