"""Facts about compiled launches of decoder layers, from a process that does not interpret; what is wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import json, sys
from tools.compiled.assembly import read
from tools.kernel_cases import CASES
from tools.kernel_resources import built, record, usage

for arch in map(int, sys.argv[2:]):
    for case, run in CASES["layers"](arch):
        if not case.startswith("float32") and (sys.argv[1] == "all" or case in sys.argv[1].split("; ")):
            for launch in record(run):
                made = built(launch, arch)
                options = {"warps": launch.options["num_warps"], "stages": launch.options.get("num_stages", 0)}
                found = {"case": case, "kernel": launch.kernel.__name__, "arch": arch}
                found["stack"] = usage(made.asm["cubin"])[1]
                wanted = {n: launch.constants.get(n) for n in ("M", "N", "STEP", "GATE")}
                print(json.dumps({**found, **options, **wanted, **read(made.asm["ptx"])._asdict()}), flush=True)
"""


def apart(script: str, folder: Path, *args: str) -> str:
    """What ``script`` prints in a process of its own, with Triton's cache in ``folder``."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def facts(said: str) -> list[dict[str, Any]]:
    """A line each."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def wrong(found: dict[str, Any]) -> str:
    """What is wrong with one launch; empty: nothing."""
    depends = found["arch"] >= 90
    if bool(found["waits"]) != depends or bool(found["tells"]) != depends:
        return f"{found['waits']} waits and {found['tells']} permissions on sm_{found['arch']}"
    if found["stack"]:
        return f"spills {found['stack']} bytes"
    if found["kernel"] != "skinny_kernel":
        return ""
    if depends and not found["fetched"]:
        return "fetches no weights ahead of its wait"
    copies, loads = ({int(k): n for k, n in found[name].items()} for name in ("copies", "loads"))
    weights = found["N"] * found["STEP"] * 2 * (2 if found["GATE"] else 1)
    needed = found["stages"] * weights // (16 * 32 * found["warps"])
    if min(copies, default=16) < 16 or copies.get(16, 0) + loads.get(16, 0) < needed:
        return f"copies {copies} and loads {loads}, where weights take {needed} of 16 bytes"
    return ""
