"""The rename tool on a small repository that has one of each kind of definition and use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.renaming.__main__ import Work, apply, work_out
from tools.renaming.index import Index, build_index
from tools.renaming.long_lines import reflow
from tools.renaming.maps import read_maps
from tools.renaming.project import Project, load

FILES = {
    "shop/masks/desk.py": '''"""The desk of masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

SEATS = 4


class Taker(Protocol):
    """``turn`` takes a change."""

    def turn(self, change: int) -> int: ...


class Desk:
    """A desk with ``seats``; the
    desk is shared. ``SEATS`` is the default of Desk.turn and of shop/masks/desk.py."""

    __slots__ = ("seats",)

    def __init__(self, seats: int = SEATS) -> None:
        self.seats = seats

    def turn(self, change: int) -> int:
        # The desk turns ``change``; see shop.masks.desk.
        return self.seats + change


class Own(Desk):
    __slots__ = ()

    def turn(self, change: int) -> int:
        return super().turn(change)


@dataclass(frozen=True)
class Row:
    seat: int
    other: "Desk | None" = None


class Pair(NamedTuple):
    left: int


def moved(row: Row, pair: Pair) -> tuple[Row, Pair]:
    return replace(row, seat=row.seat + 1), pair._replace(left=pair.left)


def use(taker: Taker) -> int:
    return taker.turn(change=1)


def run() -> str:
    seat = [seat for seat in range(3)]
    use(Desk())
    row = Row(seat=1)
    match row:
        case Row(seat=found):
            return f"{row.seat} {Desk(seats=2).turn(3)} seats of the desk {found!r} {seat}"
    return "the_desk"
''',
    "shop/masks/user.py": """from __future__ import annotations

import shop.masks.desk
from shop.masks import desk
from shop.masks.desk import SEATS, Desk, Row
from shop.masks.desk import run as go

TABLE = {"desk": "shop.masks.desk:Desk.turn", "file": "shop/masks/desk.py"}


def total(rows: list[Row]) -> int:
    return sum(row.seat for row in rows) + SEATS + desk.SEATS + shop.masks.desk.SEATS


def named(one: Desk, value: object) -> int:
    go()
    return int(getattr(one, "seats")) + len(str(value.seats))  # type: ignore[attr-defined]
""",
    "shop/__init__.py": "",
    "checks/test_it.py": """from shop.masks import desk


def test_it(monkeypatch) -> None:
    monkeypatch.setattr(desk, "SEATS", 5)
    monkeypatch.setattr("shop.masks.desk.Desk.turn", lambda self, change: 1)
    assert desk.Desk(2).seats == 2
""",
    "notes/a.md": "The desk is `Desk` of [it](../shop/masks/desk.py): `Row.seat`, `shop.masks.desk`, --the desk.\n",
    "pyproject.toml": '[tool.setuptools]\npackages = [\n    "shop",\n    "shop.masks",\n]\n'
    "[tool.mypy]\nstrict = true\nnamespace_packages = true\nexplicit_package_bases = true\n",
}
MAP = """
[files]
"shop/masks/desk.py" = "shop/matching/manager.py"
[symbols]
"shop/masks/desk.py::Desk" = "MatcherManager"
"shop/masks/desk.py::Taker.turn" = "apply"
"shop/masks/desk.py::Row.seat" = "row"
"shop/masks/desk.py::Pair.left" = "first"
"shop/masks/desk.py::SEATS" = "ROWS"
"shop/masks/desk.py::Desk.seats" = "rows"
"shop/masks/desk.py::gone" = "went"
[params]
"shop/masks/desk.py::Desk.__init__(seats)" = "rows"
"shop/masks/desk.py::Taker.turn(change)" = "delta"
[locals]
"shop/masks/desk.py::run" = { seat = "rows" }
[words]
"**" = { "the desk" = "the matcher manager" }
"""


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Index]:
    root = tmp_path_factory.mktemp("repository")
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    project = load(root)
    return project, build_index(project)


def planned(indexed: tuple[Project, Index], tmp_path: Path, text: str) -> Work:
    (tmp_path / "a.toml").write_text(text)
    return work_out(*indexed, read_maps([tmp_path / "a.toml"]))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ('[symbols]\n"shop/masks/desk.py::Desk" = "Row"', "Desk and Row would both be Row"),
        ('[symbols]\n"shop/masks/desk.py::Desk.turn" = "seats"', "would both be seats"),
        ('[symbols]\n"shop/masks/desk.py::use" = "int"', "builtin int would mean"),
        ('[locals]\n"shop/masks/desk.py::run" = { row = "seat" }', "would both be seat"),
        ('[files]\n"shop/masks/desk.py" = "shop/masks/user.py"', "taken by"),
        ('[symbols]\n"shop/masks/desk.py::Desk.turn" = "a"\n"shop/masks/desk.py::Taker.turn" = "b"', "share one name"),
    ],
)
def test_conflicts_are_found(indexed: tuple[Project, Index], tmp_path: Path, entries: str, said: str) -> None:
    assert any(said in p for p in planned(indexed, tmp_path, entries).edits.problems)


def test_every_use_follows(indexed: tuple[Project, Index], tmp_path: Path) -> None:
    work = planned(indexed, tmp_path, MAP)
    assert work.edits.problems == []
    assert work.plan.warnings == ["a.toml: shop/masks/desk.py::gone: not found"]
    assert work.edits.undecided == []
    root = indexed[0].root
    apply(work, ["true"])
    new = (root / "shop/matching/manager.py").read_text()
    assert '"""The matcher manager of masks."""' in new and "class MatcherManager:" in new and "ROWS = 4" in new
    assert (
        "def turn" not in new
        and "change" not in new.replace("a change", "")
        and new.count("def apply(self, delta: int)") == 3
    )
    assert (
        '"""A desk with ``rows``; the\n    matcher manager is shared. ``ROWS`` is the default of MatcherManager.apply'
        in new
    )
    assert '__slots__ = ("rows",)' in new and "self.rows = rows" in new and "taker.apply(delta=1)" in new
    assert "return super().apply(delta)" in new and 'other: "MatcherManager | None"' in new
    assert "replace(row, row=row.row + 1), pair._replace(first=pair.first)" in new
    assert "rows = [rows for rows in range(3)]" in new and "case Row(row=found):" in new
    assert "{row.row} {MatcherManager(rows=2).apply(3)} seats of the matcher manager {found!r} {rows}" in new
    assert 'return "the_desk"' in new
    user = (root / "shop/masks/user.py").read_text()
    assert "import shop.matching.manager\nfrom shop.matching import manager\n" in user
    assert "import ROWS, MatcherManager, Row\n" in user and "row.row for row in rows" in user
    assert "ROWS + manager.ROWS + shop.matching.manager.ROWS" in user
    assert '"shop.matching.manager:MatcherManager.apply", "file": "shop/matching/manager.py"' in user
    assert 'getattr(one, "rows")' in user and "value.rows" in user and '{"desk":' in user
    test = (root / "checks/test_it.py").read_text()
    assert 'setattr(manager, "ROWS", 5)' in test and "manager.MatcherManager(2).rows" in test
    assert '"shop.matching.manager.MatcherManager.apply"' in test
    assert (root / "notes/a.md").read_text() == (
        "The matcher manager is `MatcherManager` of [it](../shop/matching/manager.py): `Row.row`,"
        " `shop.matching.manager`, --the desk.\n"
    )
    assert '"shop.matching",' in (root / "pyproject.toml").read_text()


def test_long_docstrings_are_broken() -> None:
    text = f'def f():\n    """{"word " * 25}end"""\n    # {"note " * 25}end\n    # more\n'
    new = reflow(text)
    assert max(map(len, new.split("\n"))) <= 120
    assert new.replace("#", "").split() == text.replace("#", "").replace('end"""', 'end """').split()
