"""Processes with standard streams that are closed, full or broken, without a temporary or a working folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trencadis.core.process.child_process_environment_and_exit import remove_rank_folders

SCRIPT = """
import sys
from trencadis.core.process.child_process_environment_and_exit import CLEANUPS, exit_now
if sys.stdout is not None:
    sys.stdout.write("x" * 10)
CLEANUPS.append(lambda: open(sys.argv[1], "w").close())
exit_now(7)
"""
STREAMS = {
    "open": "", "closed output": ">&-", "closed errors": "2>&-", "all closed": "<&- >&- 2>&-", "full": "> /dev/full",
    "all full": "> /dev/full 2>&1", "broken": "> >(true)",
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_the_code_is_the_one_that_was_asked_for(name: str, tmp_path: Path) -> None:
    done = f"{tmp_path}/done"
    line = f'"{sys.executable}" -P -c "$SCRIPT" {done} {STREAMS[name]}'
    found = subprocess.run(
        ["/bin/bash", "-c", line],
        env={**os.environ, "SCRIPT": SCRIPT, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 7 and found.stderr == "" and os.path.exists(done)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EROFS])
def test_without_a_temporary_folder_there_is_nothing_to_remove(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    remove_rank_folders(1)


@pytest.mark.parametrize("command", ["serve", "plan", "run-batch", "devices"])
def test_a_command_in_a_folder_that_was_removed_is_one_line(command: str, tmp_path: Path) -> None:
    """MKL, which torch brings, ends a process that has no working folder."""
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f'cd {gone} && rmdir {gone} && exec "{sys.executable}" -P -m trencadis.server.cli.main {command}'
    found = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and "working folder" in found.stderr
