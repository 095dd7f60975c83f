"""The commands that the pages write run as they stand, in a fresh clone."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "design").glob("*.md"))]
COMMAND = re.compile(r"((?:[A-Z_]+=\S+ )*)python( -P)? (?:-m (benchmarks[.\w]*)|(benchmarks/\w+\.py))([^`#\n]*)")


def commands() -> list[tuple[str, str, str, str, str]]:
    """(page, the whole command, variables, module or file, arguments) of every line of a page."""
    return [
        (page.name, found[0].strip(), found[1], found[3] or found[4], found[5])
        for page in PAGES
        for found in COMMAND.finditer(page.read_text(encoding="utf-8"))
    ]


def source(target: str) -> Path:
    """The file that holds the program; a package's is ``run.py``, which its ``__main__.py`` calls, or that itself."""
    path = ROOT / (target if target.endswith(".py") else target.replace(".", "/") + ".py")
    inside = (path.with_suffix("") / name for name in ("run.py", "__main__.py"))
    return path if path.is_file() else next(file for file in inside if file.is_file())


def helped(command: str, target: str) -> subprocess.CompletedProcess[str]:
    """The command, with --help for its arguments, as a shell in the clone's root runs it."""
    line = program(command, target).replace("python", shlex.quote(sys.executable), 1)
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(["bash", "-c", f"{line} --help"], cwd=ROOT, env=env, capture_output=True, text=True)


def program(command: str, target: str) -> str:
    """The command without its arguments."""
    return command[: command.index(target) + len(target)]


def test_there_are_commands_to_look_at() -> None:
    found = {target for _, _, _, target, _ in commands()}
    assert {"benchmarks.engine", "benchmarks.packing", "benchmarks.gpu", "benchmarks/run.py"} <= found


def test_every_documented_program_and_option_exists() -> None:
    for page, command, _, target, arguments in commands():
        text = source(target).read_text(encoding="utf-8")
        own = arguments.split(" -- ")[0]
        missing = [word for word in re.findall(r"--[a-z][\w-]*", own) if f'"{word}"' not in text]
        assert not missing, f"{page}: {command}: {missing}"


def test_no_command_hides_the_folder_that_it_needs() -> None:
    """-P keeps the working folder off the path, where ``benchmarks`` lies and nowhere else."""
    bad = [f"{page}: {command}" for page, command, variables, _, _ in commands()
           if "python -P" in command and "PYTHONPATH=$PWD" not in variables]  # fmt: skip
    assert not bad


def test_usage_lines_of_the_programs_too() -> None:
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for found in COMMAND.finditer(path.read_text(encoding="utf-8")):
            assert not found[2] or "PYTHONPATH=$PWD" in found[1], f"{path.name}: {found[0]}"


def test_a_documented_line_runs() -> None:
    page, command, _, target, _ = next(c for c in commands() if c[3] == "benchmarks.packing")
    done = helped(command, target)
    assert done.returncode == 0 and "usage:" in done.stdout, (page, done.stderr)


@pytest.mark.long
@pytest.mark.parametrize(("command", "target"), sorted({(program(c[1], c[3]), c[3]) for c in commands()}))
def test_every_documented_line_runs(command: str, target: str) -> None:
    done = helped(command, target)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_the_pages_name_trencadis_serve() -> None:
    """ray and others install a ``serve`` too. The emulated Gaudi's line alone stands in its short form, with a word."""
    short = re.compile(r"(?:^|&& |true )serve (.*)", re.MULTILINE)
    found = [(p.name, m[1].split("#")[0].strip()) for p in PAGES for m in short.finditer(p.read_text(encoding="utf-8"))]
    assert {line for _, line in found} == {"--device hpu"} and {name for name, _ in found} == {"README.md", "hpu.md"}
    for name, _ in found:
        text = next(p for p in PAGES if p.name == name).read_text(encoding="utf-8")
        assert re.search(r"ray (?:has|and)", text), f"{name} says nothing of the other serve"
