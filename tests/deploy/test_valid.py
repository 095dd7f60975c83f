"""The tools of those who read the files find nothing wrong with them; each is skipped where it is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.test_files import DEPLOY, KUBERNETES, ROOT, expressions

pytestmark = pytest.mark.long


def needed(tool: str) -> str:
    found = shutil.which(tool) or shutil.which(str(Path(sys.executable).parent / tool))
    if found is None:
        pytest.skip(f"needs {tool}")
    return found


@pytest.mark.parametrize(("overlay", "tag"), [("cpu", "cpu"), ("cuda", "cuda"), ("gaudi", "gaudi"), ("many", "cuda")])
def test_manifests_are_valid(overlay: str, tag: str, tmp_path: Path) -> None:
    made = subprocess.run(
        [needed("kubectl"), "kustomize", KUBERNETES / "overlays" / overlay], check=True, capture_output=True, text=True
    ).stdout
    (tmp_path / "all.yaml").write_text(made)
    assert f"trencadis:{tag}" in made
    checked = subprocess.run(
        [needed("kubernetes-validate"), "--strict", tmp_path / "all.yaml"], capture_output=True, text=True
    )
    print(checked.stdout + checked.stderr)
    assert checked.returncode == 0 and (checked.stdout + checked.stderr).count(" passed for resource ") == 4


def test_the_unit_is_valid(tmp_path: Path) -> None:
    # The path of the server is that of an installation; the tool wants it to exist.
    unit = (
        (DEPLOY / "systemd" / "trencadis-server.service")
        .read_text()
        .replace("/opt/trencadis/venv/bin/serve", sys.executable)
    )
    (tmp_path / "trencadis-server.service").write_text(unit)
    done = subprocess.run(
        [needed("systemd-analyze"), "verify", tmp_path / "trencadis-server.service"], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


def test_expressions_parse() -> None:
    promql = pytest.importorskip("promql_parser", reason="needs promql-parser")
    for expression in expressions():
        promql.parse(expression.replace("$__rate_interval", "1m").replace("$model", ".+"))
    print(f"{len(expressions())} expressions")


def test_install_in_an_empty_environment_serves(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    # The package is copied, as in an image: what only lies in the checkout must not be needed.
    source = tmp_path / "src"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in filter(None, tracked):
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    env = {**os.environ, "PYTHON": str(python)}
    subprocess.run(["sh", source / "deploy" / "install.sh", "cpu", source, tmp_path / "root"], check=True, env=env)
    shutil.rmtree(source)
    entry = tmp_path / "root" / "opt" / "trencadis" / "entrypoint.sh"
    env = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    env["HF_HOME"] = "/proc/nothing"  # a cache that cannot be written
    done = subprocess.run([entry, "--version"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    from tests.traffic.server_process import free_port

    port = free_port()
    server = subprocess.Popen([entry, "--port", str(port), "--host", "127.0.0.1"], env=env)
    try:
        from tests.deploy.waiting import until_ready

        until_ready(f"http://127.0.0.1:{port}/ready", server)
    finally:
        server.terminate()
        assert server.wait(60) == 0
