"""What CI runs: a browser is installed where it may be, and its lack never fails the run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = "the page's flows are skipped"


def ci_run(folder: Path, **commands: str) -> tuple[list[str], str]:
    """The targets that .ci/run makes, and what it prints, where only ``commands`` (scripts by name) can be found."""
    for name in ("bash", "dirname", "touch", "chmod"):
        (folder / name).symlink_to(shutil.which(name) or name)
    made = folder / "made"
    made.touch()
    usual = {"make": f'echo "$*" >> {made}', "id": "echo 1000"}
    for name, script in {**usual, **commands}.items():
        (folder / name).write_text(
            f"#!{folder}/bash\n{script.replace('MADE', str(made)).replace('BIN', str(folder))}\n"
        )
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [folder / "bash", ROOT / ".ci" / "run"], env={"PATH": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return made.read_text().split(), done.stdout


@pytest.mark.parametrize(
    ("commands", "targets", "said"),
    [
        ({}, ["test"], False),
        ({"id": "echo 0"}, ["test"], False),
        ({"apt-get": "touch BIN/chromium"}, ["test"], False),
        ({"id": "echo 0", "apt-get": "exit 1"}, ["test"], True),
        ({"id": "echo 0", "apt-get": "touch BIN/chromium; chmod +x BIN/chromium"}, ["browser", "test"], False),
        ({"chromium": ":", "id": "echo 0", "apt-get": "echo apt >> MADE"}, ["browser", "test"], False),
        ({"google-chrome": ":", "make": 'echo "$*" >> MADE; [ "$1" = test ]'}, ["browser", "test"], True),
    ],
)
def test_a_browser_is_installed_where_it_may_be(
    commands: dict[str, str], targets: list[str], said: bool, tmp_path: Path
) -> None:
    made, printed = ci_run(tmp_path, **commands)
    assert made == targets and (SKIPPED in printed) == said


def test_a_run_that_fails_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        ci_run(tmp_path, make="exit 1")
