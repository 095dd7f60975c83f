"""Applies rename maps: ``python -m tools.renaming --check`` shows what would change, without --check it changes it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.renaming.edits import collect
from tools.renaming.guesses import Edits
from tools.renaming.index import Index, load_index
from tools.renaming.long_lines import WIDTH, reflow, wrap
from tools.renaming.maps import Maps, read_maps
from tools.renaming.names import Names
from tools.renaming.others import collect_others, package_list
from tools.renaming.plan import Plan, Planner
from tools.renaming.project import Project, load
from tools.renaming.prose import collect_prose
from tools.renaming.texts import Texts

HERE = Path(__file__).resolve().parent


@dataclass
class Work:
    """What maps come to on one tree."""

    project: Project
    plan: Plan
    names: Names
    edits: Edits


def work_out(project: Project, index: Index, maps: Maps) -> Work:
    """Finds all edits; writes nothing."""
    planner = Planner(project, index, maps)
    plan = planner.build()
    names = Names(project, planner.groups, plan)
    edits = collect(project, index, names, maps.uses)
    texts = Texts(names, maps.words)
    for file in project.files.values():
        collect_prose(file, names, texts, edits)
    collect_others(names, texts, maps.c_names, edits)
    edits.problems = list(dict.fromkeys([*plan.problems, *edits.problems]))
    return Work(project, plan, names, edits)


def edited(data: bytes, edits: dict[tuple[int, int], str]) -> bytes:
    """The bytes of a file with its replacements."""
    parts, at = [], 0
    for (start, end), new in sorted(edits.items()):
        assert start >= at, f"replacements overlap at {start}"
        parts += [data[at:start], new.encode()]
        at = end
    return b"".join([*parts, data[at:]])


def apply(work: Work, ruff: list[str]) -> None:
    """Writes all edits, moves files with git, sorts imports and formats."""
    root, plan = work.project.root, work.plan
    for path, edits in work.edits.by_file.items():
        (root / path).write_bytes(edited((root / path).read_bytes(), edits))
    pyproject = root / "pyproject.toml"
    if pyproject.is_file():
        text = pyproject.read_text(encoding="utf-8")
        pyproject.write_text(package_list(text, work.project.names, plan.moves), encoding="utf-8")
    _move(root, plan.moves)
    changed = [plan.moves.get(p, p) for p in work.edits.by_file]
    python = sorted(p for p in changed if p.endswith(".py"))
    for flags in (["check", "--select", "I,RUF023", "--fix", "-q"], ["format", "-q"]) if python else ():
        subprocess.run([*ruff, *flags, *python], cwd=root, check=False)
    broken = [path for path in python if _broken(root / path)]
    if broken:
        subprocess.run([*ruff, "format", "-q", *broken], cwd=root, check=False)


def _broken(path: Path) -> bool:
    """Breaks the long lines of a file; whether there were any."""
    text = path.read_text(encoding="utf-8")
    if max(map(len, text.split("\n"))) <= WIDTH:
        return False
    new = wrap(reflow(text))
    path.write_text(new, encoding="utf-8")
    return new != text


def _move(root: Path, moves: dict[str, str]) -> None:
    """Moves files in two steps, as one may take the place of another."""
    waiting = []
    for i, (old, new) in enumerate(sorted(moves.items())):
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        held = new if not (root / new).exists() else f"{new}.moving{i}"
        subprocess.run(["git", "mv", old, held], cwd=root, check=True)
        if held != new:
            waiting.append((held, new))
    for held, new in waiting:
        subprocess.run(["git", "mv", held, new], cwd=root, check=True)


def report(work: Work, verbose: bool, everything: bool = False) -> None:
    """Prints what there is to read before the edits are written."""
    plan, edits = work.plan, work.edits
    for title, lines in (
        ("also renamed, as they override or implement", plan.extended),
        ("renamed on a guess", edits.guessed if everything else []),
        ("undecided, unlikely", edits.unlikely if everything else []),
        ("undecided", edits.undecided),
        ("warning", plan.warnings),
        ("conflict", edits.problems),
    ):
        if verbose or title in ("warning", "conflict"):
            for line in lines:
                print(f"{title}: {line}")
    count = sum(map(len, edits.by_file.values()))
    print(
        f"{count} replacements in {len(edits.by_file)} files, {len(plan.moves)} files move, "
        f"{len(plan.symbols)} definitions, {len(plan.slots)} attributes, {len(plan.params)} parameters, "
        f"{len(plan.locals)} variables; {len(plan.extended)} extended, {len(edits.undecided)} undecided "
        f"(and {len(edits.unlikely)} unlikely), "
        f"{len(plan.warnings)} warnings, {len(edits.problems)} conflicts"
    )


def main(args: list[str] | None = None) -> int:
    """1 where there are conflicts; nothing is written then."""
    parser = argparse.ArgumentParser(prog="tools.renaming", description=__doc__)
    parser.add_argument("--map", type=Path, nargs="+", help="maps; without it, those beside this tool")
    parser.add_argument("--root", type=Path, default=HERE.parent.parent, help="the repository to change")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--force", action="store_true", help="write despite conflicts")
    parser.add_argument("--quiet", action="store_true", help="print conflicts, warnings and counts only")
    parser.add_argument("--all", action="store_true", help="print undecided uses of names that libraries have too")
    parser.add_argument("--index", type=Path, help="where mypy's results are kept (.lint/rename_index.pickle)")
    asked = parser.parse_args(args)
    root = asked.root.resolve()
    project = load(root)
    index = load_index(project, asked.index or root / ".lint" / "rename_index.pickle")
    work = work_out(project, index, read_maps(asked.map or sorted(HERE.glob("*.toml"))))
    report(work, not asked.quiet, asked.all)
    if asked.check or (work.edits.problems and not asked.force):
        return 1 if work.edits.problems else 0
    apply(work, [sys.executable, "-m", "ruff"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
