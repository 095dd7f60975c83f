"""Images, manifests, unit, boards and alerts name flags, paths, metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import dashboards
from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.process.engine_messages import BucketUse, EngineStats, GraphCounters
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.server.config.command_line_parser import parse
from trencadis.server.config.flag_table_and_lookup import get_flag_table
from trencadis.server.config.resolve_settings import resolve_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
NAME = re.compile(r"\b(?:vllm:|http_)\w+")
LABELS = re.compile(r"(?:by \(([^)]*)\))|(?:\{([^}]*)\})")
OURS = {"$__rate_interval"}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("deploy")))


def command_lines() -> dict[str, list[str]]:
    """Every command line of the server that the files hold."""
    server = yaml.safe_load_all((KUBERNETES / "base" / "server.yaml").read_text())
    container = next(d for d in server if d["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    entries = re.findall(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    lines = {f"image {i}": json.loads(entry)[1:] for i, entry in enumerate(entries)}
    unit = (DEPLOY / "systemd" / "trencadis-server.service").read_text()
    started = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert started[0].endswith("/bin/serve")
    lines["unit"] = started[1:]
    return {**lines, "kubernetes": container["args"], "compose": compose["services"]["cpu"]["command"]}


@pytest.mark.parametrize("name", command_lines())
def test_command_lines_are_ours(name: str, tmp_path: Path) -> None:
    words = [word.replace("${MODEL:-}", "some/model") for word in command_lines()[name]]
    if "--config" in words:
        file = tmp_path / "serve.yaml"
        file.write_text("max-num-seqs: 4\n")
        words[words.index("--config") + 1] = str(file)
    resolve_settings(parse([*words, "--model", "other/model"]), {})  # what follows the image's name counts
    for word in words:
        assert not word.startswith("--") or word in ("--config",) or word[2:].replace("-", "_") in get_flag_table(), (
            word
        )


def test_variables_are_ours() -> None:
    text = "\n".join(p.read_text() for p in DEPLOY.rglob("*") if p.is_file() and p.suffix != ".json")
    known = (ROOT / "docs" / "configuration.md").read_text()
    for name in set(re.findall(r"\b(?:VLLM|TRENCADIS)_\w+", text)):
        assert f"`{name}`" in known or name in ("VLLM_API_KEY",), name


def test_probes_and_grace_periods_fit_the_server(harness: ScriptedApp) -> None:
    deployment = next(yaml.safe_load_all((KUBERNETES / "base" / "server.yaml").read_text()))
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"/ready", "/live"} and all(harness.call(path).status_code == 200 for path in probes)
    flags = dict(zip(container["args"][::2], map(float, container["args"][1::2]), strict=True))
    assert pod["terminationGracePeriodSeconds"] > flags["--drain-delay"] + flags["--shutdown-timeout"]
    noticed = container["readinessProbe"]["periodSeconds"] * container["readinessProbe"]["failureThreshold"]
    assert flags["--drain-delay"] > noticed
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for file, path in (
        ("service", "selector"),
        ("disruption", "selector/matchLabels"),
        ("monitor", "selector/matchLabels"),
    ):
        found: Any = yaml.safe_load((KUBERNETES / "base" / f"{file}.yaml").read_text())["spec"]
        for part in path.split("/"):
            found = found[part]
        assert found == labels, file


def test_the_unit_waits_as_long_as_the_server_drains() -> None:
    unit = (DEPLOY / "systemd" / "trencadis-server.service").read_text()
    defaults = resolve_settings(parse([]), {}).server
    seconds = float(re.search(r"TimeoutStopSec=(\d+)s", unit).group(1))  # type: ignore[union-attr]
    assert seconds > defaults.shutdown_timeout + defaults.drain_delay
    assert "RestartPreventExitStatus=2" in unit and "Type=notify" in unit


def test_images_hold_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (DEPLOY / "install.sh").read_text()
    assert {"cpu", "cuda"} <= set(project["optional-dependencies"]) and "extra=cuda" in script
    assert f"torch{project['optional-dependencies']['cuda'][0][5:]}" in script
    assert "trencadis" in project["scripts"], "ray installs a `serve` of its own"
    assert 'exec trencadis serve "$@"' in (DEPLOY / "entrypoint.sh").read_text()
    done = subprocess.run(["sh", DEPLOY / "install.sh", "tpu", ROOT], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "install.sh: tpu is no device; known are cpu, cuda and gaudi\n"


def expressions() -> list[str]:
    boards = [json.loads(p.read_text()) for p in sorted((DEPLOY / "grafana").glob("*.json"))]
    found = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def scraped(harness: ScriptedApp, folder: Path) -> dict[str, set[str]]:
    """Labels of each metric after a request, a launch without a graph, a warm-up and a refusal."""
    keys = folder / "keys.yaml"
    digest = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"
    keys.write_text(f"keys:\n- name: ann\n  sha256: {digest}\n  concurrency: 1\n")
    keys.chmod(0o600)
    app = harness.app(api_key_file=str(keys), max_num_queued_reqs=3)
    headers = {"x-api-key": "password"}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    harness.call("/v1/chat/completions", chat, headers=headers)
    harness.call("/v1/chat/completions", {**chat, "n": 2, "temperature": 1}, headers=headers)
    state = app.state.trencadis
    state.admission.rejected["max_num_queued_reqs"] += 1
    use = BucketUse("vision", 64, 128, 0.1, "vision[128]", "compiled", True, "warming", 1, 64)
    graphs = GraphCounters(1, 0, {"text": 5}, Warming(total=3))
    state.metrics.on_stats(EngineStats(step_tokens=[3], buckets=[use], graphs=graphs))
    harness.engine.stats = EngineStats(graphs=graphs)
    found: dict[str, set[str]] = defaultdict(set)
    for line in harness.call("/metrics", headers=headers).text.splitlines():
        if match := re.match(r"([\w:]+)(?:\{(.*)\})? ", line):
            found[match[1]] |= set(re.findall(r"(\w+)=", match[2] or ""))
    return found


def test_boards_and_alerts_name_metrics_and_labels_of_a_live_scrape(harness: ScriptedApp, tmp_path: Path) -> None:
    known = scraped(harness, tmp_path)
    for expression in expressions():
        names = NAME.findall(expression)
        assert names or expression.startswith("up{"), expression
        for name in names:
            assert name in known, f"{name} of {expression}"
        requested = {
            label
            for group, braces in LABELS.findall(expression)
            for label in (group.split(",") if group else re.findall(r"(\w+)(?:=|!=)", braces))
        }
        for label in {label.strip() for label in requested} - {"job"}:
            assert any(label in known[name] for name in names), f"{label} of {expression}"


def test_boards_are_what_the_tool_writes() -> None:
    done = subprocess.run([sys.executable, "deploy/dashboards.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert set(dashboards.BOARDS) == {p.stem for p in (DEPLOY / "grafana").glob("*.json")}
