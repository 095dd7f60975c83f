"""The programs of examples/clients, by the libraries that others use, against servers on this machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.traffic.client_examples import EXAMPLES, FLAGS, FOLDER, NEEDS, lacking, ran, started
from tests.traffic.server_process import ROOT, RunningServer

RUNS = [(name, kind) for name, example in EXAMPLES.items() for kind in example.shows]
REQUIREMENTS = FOLDER / "requirements.txt"


def test_every_program_is_in_the_table_and_needs_what_is_pinned() -> None:
    files = {p.stem for p in FOLDER.glob("*.py")} - {"connect"}
    assert files == set(EXAMPLES)
    pinned = {re.split(r"[>=<\[]", line)[0] for line in REQUIREMENTS.read_text().split("\n") if line[:1].isalpha()}
    known = {"llama_index": "llama-index-llms-openai-like", "agents": "openai-agents"}
    for name, example in EXAMPLES.items():
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        imports = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert any(module.split(".")[0] == example.library for module in imports), name
        assert known.get(example.library, example.library.replace("_", "-")) in pinned, name
        assert set(example.shows) <= {*FLAGS, "scripted"} and (not example.needs or example.needs in NEEDS)


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of the environment that ``make test-clients`` makes."""
    folder = Path(os.environ.get("CLIENTS", ROOT / ".clients"))
    made = subprocess.run(
        ["make", f"CLIENTS={folder}", f"{folder}/.installed"], cwd=ROOT, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"{REQUIREMENTS.name} cannot be installed here: {made.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RunningServer]]:
    """``serving(kind)``: the server of that kind, started at its first use."""
    made: dict[str, RunningServer | str] = {}
    with ExitStack() as stack:

        def get(kind: str) -> RunningServer:
            if kind not in made:
                try:
                    made[kind] = stack.enter_context(started(kind, tmp_path_factory.mktemp(kind)))
                except AssertionError as error:
                    made[kind] = str(error)
            found = made[kind]
            if isinstance(found, str):
                if "--runner" in found and "supported" in found:
                    pytest.skip(f"no {kind} server: {found.strip().splitlines()[-1]}")
                pytest.fail(f"no {kind} server: {found}")
            return found

        yield get


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_an_example_prints_what_it_says(
    name: str, kind: str, python: Path, serving: Callable[[str], RunningServer]
) -> None:
    example = EXAMPLES[name]
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{example.library}') is None)"
    if subprocess.run([python, "-c", probe]).returncode:
        pytest.skip(f"{example.library} is not installed in {python}")
    running = serving(kind)
    if reason := lacking(running, example.needs):
        pytest.skip(f"{name}: {reason}")
    done = ran(python, name, f"{running.url}/v1")
    print(f"\n{name} ({kind}), {done.seconds:.1f} s\n{done.out}")
    assert done.code == 0, done.error[-3000:]
    assert re.search(example.shows[kind], done.out), done.out
    assert "Traceback" not in running.text()
