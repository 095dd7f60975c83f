"""A process whose standard streams are closed, full or broken ends with its code, and says nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
def test_the_code_is_the_one_that_was_asked_for(name: str, tmp_path: object) -> None:
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
