"""``VLLM_TRACE_FUNCTION=1`` writes our calls and returns, and nobody else's, to a file of the process's own."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from trencadis.core.errors import suggest_name
from trencadis.core.process import function_trace
from trencadis.core.process.function_trace import FunctionTrace

LINE = re.compile(r"\d+\.\d{6} (\d+) (call|return) (\S+) core/errors\.py:\d+")


def test_calls_and_returns_of_ours_in_every_thread() -> None:
    out = io.StringIO()
    end = FunctionTrace(out, (str(Path(function_trace.__file__).parent.parent / "errors.py"),)).start()
    try:
        suggest_name("abd", ["abc"])
        thread = threading.Thread(target=suggest_name, args=("abd", ["abc"]))
        thread.start()
        thread.join()
    finally:
        end()
    suggest_name("abd", ["abc"])
    lines = [LINE.fullmatch(line) for line in out.getvalue().splitlines()]
    assert lines and all(lines)
    named = [(m[1], m[2], m[3]) for m in lines if m is not None and m[3] == "suggest_name"]
    assert [what for _, what, _ in named] == ["call", "return"] * 2 and len({thread for thread, _, _ in named}) == 2


def test_a_process_that_is_asked_writes_a_file_for_its_user_alone(tmp_path: Path) -> None:
    code = "from trencadis.core.process import function_trace as f; f.start_if_asked()\n"
    code += "from trencadis.core.errors import suggest_name; suggest_name('abd', ['abc']); import os; os._exit(0)"
    for requested, count in (("0", 0), ("1", 1)):
        env = {**os.environ, "VLLM_TRACE_FUNCTION": requested, "TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
        files = list(tmp_path.glob("trencadis-calls-*.log"))
        assert len(files) == count
    assert files[0].stat().st_mode & 0o777 == 0o600
    assert " call suggest_name core/errors.py:" in files[0].read_text(), "also where the process ends at once"
