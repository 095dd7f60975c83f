"""Starts in folders that look like Gaudi's containers, each in a process of its own: a false version proves no more."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hpu.conftest import fork_starts, run_in_pieces
from tests.stubs.gaudi_container import PUBLISHED, ROOT, Container, make, put_plugin, put_torch
from trencadis.core.process.torch_detection import package_folder

pytestmark = pytest.mark.part("gaudi")

UNSETTLED = "import sys, torch; m = sys.modules.get('habana_frameworks.torch'); print(m.AT_IMPORT if m else 'out')"

START = """
import sys
from trencadis.core.errors import StartupError
from trencadis.core.process import torch_detection
try:
    for line in torch_detection.prepare_device_env("hpu").lines:
        print("banner", line)
    assert "torch" not in sys.modules
    torch_detection.import_torch()
    import trencadis.core.engine.engine_builder
    from trencadis.backends.hpu.start.bridge_loader import open_bridge
    print("mode", 1 if open_bridge().is_lazy() else 0)
    from habana_frameworks.torch import AT_IMPORT, LAZY
    print("told", AT_IMPORT["PT_HPU_LAZY_MODE"])
except StartupError as error:
    print("line", error)
"""

CHAT = """
from trencadis import LLM, SamplingParams
llm = LLM(device="hpu", dtype="float32", warmup="skip", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=128,
          kv_cache_memory_bytes="16MiB", mm_processor_kwargs={"max_pixels": 50176}, async_depth=0)
chat = [{"role": "user", "content": "How many circles are there?"}]
print("tokens", llm.chat(chat, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids)
print("breaks", llm.engine.stats().graphs.graph_breaks)
from habana_frameworks.torch import AT_IMPORT
print("told", AT_IMPORT)
"""
CHAT_OR_LINE = (
    "try:\n"
    + textwrap.indent(CHAT, "    ")
    + """
except Exception as error:
    if type(error).__name__ not in ("StartupError", "OutOfDeviceMemory"):
        raise
    print("line", error)
"""
)
"""Any other error ends in a traceback."""
WHOLE = "\nbreaks 0\n"
"""Every part was compiled as one graph."""
TOKENS = "[40, 320, 536, 300, 13, 767, 815, 345]"
"""The demo's answer to that question on a CPU."""

SMALL = {"HABANA_STUB_DEVICE": "cpu", "VLLM_MULTIMODAL_BUCKETS": "256"}
"""The stub computes on the CPU, where the profile of the largest images would take its time.

There ``.cpu()`` copies nothing, so that a step in flight would write into the results of the one before: depth 0.
"""


def run(container: Container, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", "-c", code]
    env = container.variables(**environ)
    return subprocess.run(line, env=env, cwd=container.folder, capture_output=True, text=True, timeout=600)


def test_torch_imports_the_plug_in_before_anything_is_settled(tmp_path: Path) -> None:
    """What happens without ``settle``: release 1.23 is in, eagerly, before its graphs could be asked for."""
    container = make(tmp_path / "c", "2.9.0+hpu_1.23.1-25.git8598e6d", "1.23.1.25")
    done = run(container, UNSETTLED)
    assert done.stdout == "{'PT_HPU_LAZY_MODE': '0'}\n", done.stderr


def test_a_container_answers_offline(tmp_path: Path) -> None:
    """Release 1.20 or 1.23, in lazy mode: the plug-in finds what was settled, and the CPU's tokens come out."""
    torch = random.Random(os.environ.get("PYTEST_SEED", "4")).choice([v for v in PUBLISHED if "hpu_1.2" in v])
    done = run(make(tmp_path / "c", torch, PUBLISHED[torch]), CHAT, **SMALL)
    assert done.returncode == 0 and f"tokens {TOKENS}" in done.stdout, done.stderr
    assert "'PT_HPU_LAZY_MODE': '1'" in done.stdout and "'PT_HPU_RECIPE_CACHE_CONFIG'" in done.stdout
    assert (tmp_path / "c" / "cache" / "recipes").is_dir()


BROKEN = {
    "libhabana_pytorch_plugin.so: undefined symbol: _ZN2at4": "it was built for another torch",
    "libSynapse.so: cannot open shared object file": "LD_LIBRARY_PATH",
}


@pytest.mark.long
@pytest.mark.parametrize("autoload", ["", "1"])
@pytest.mark.parametrize("said", BROKEN)
def test_a_plug_in_that_does_not_load_is_one_line(said: str, autoload: str, tmp_path: Path) -> None:
    """Whether we import it or torch does, because the user says so."""
    container = make(tmp_path / "c", "2.13.0+cpu", "1.24.2.31")
    environ = {"HABANA_STUB_BROKEN": said, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = run(container, START, **environ)
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("line")]
    assert said in line and (autoload or BROKEN[said] in line) and "Traceback" not in done.stderr
    assert not autoload or "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it out" in line


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    rest = [line for line in done.stdout.splitlines() if not line.startswith("banner")]
    if len(rest) == 2:
        mode, reported = (line.split()[1] for line in rest)
        assert mode == reported
        return mode
    (line,) = rest
    assert line.startswith("line ")
    return line


def wanted(torch: str, requested: str, plugin: str) -> str:
    if torch.startswith("2.5"):
        return "older than 2.6"
    if plugin != "present":
        return {"missing": "is not installed", "mismatched": "was built for torch"}[plugin]
    if requested == "1" and not re.search(r"\+(hpu|git)", torch):
        return "needs Gaudi's own build"
    if requested == "0" and int(torch.split(".")[1]) < 9:
        return "needs torch 2.9 or newer"
    return requested or ("1" if "hpu_" in torch else "0")


@pytest.mark.long
def test_every_published_stack_in_a_process_of_its_own(tmp_path: Path) -> None:
    cases = list(itertools.product(PUBLISHED, ("present", "missing", "mismatched")))
    chosen = []
    for number, (torch, plugin) in enumerate(cases):
        other = "2.9.0" if torch.startswith("2.7") else "2.7.1"
        version = None if plugin == "missing" else PUBLISHED[torch]
        container = make(tmp_path / str(number), torch, version, other if plugin == "mismatched" else None)
        for requested, autoload in itertools.product(("1", "0", ""), ("", "0")):
            env = {"PT_HPU_LAZY_MODE": requested, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
            found = outcome(run(container, START, **{k: v for k, v in env.items() if v}))
            want = wanted(torch, requested, plugin)
            assert found == want or (len(want) > 1 and want in found), (torch, plugin, requested, autoload, found)
            chosen.append(want)
    print(f"\n{len(chosen)} starts: lazy {chosen.count('1')}, compile {chosen.count('0')}, one line "
          f"{sum(len(c) > 1 for c in chosen)}, tracebacks 0")  # fmt: skip
    assert len(chosen) == 180


@pytest.mark.long
@pytest.mark.parametrize("torch", ["2.11.0a0+git009b5f6", "2.11.0", "2.13.0+cpu"])
def test_a_container_of_compile_mode_answers_offline(torch: str, tmp_path: Path) -> None:
    done = run(make(tmp_path / "c", torch, PUBLISHED[torch]), CHAT, **SMALL)
    assert done.returncode == 0 and f"tokens {TOKENS}" in done.stdout and WHOLE in done.stdout, done.stderr
    assert "'PT_HPU_LAZY_MODE': '0'" in done.stdout and "'PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE': '0'" in done.stdout


@pytest.mark.long
def test_two_ranks_in_a_container_settle_each_for_itself(tmp_path: Path) -> None:
    """Each is told its own folder of recipes."""
    container = make(tmp_path / "c", "2.9.0+hpu_1.23.1-25.git8598e6d", "1.23.1.25", cards=2)
    chat = CHAT.replace('device="hpu"', 'device="hpu", tensor_parallel_size=2')
    done = run(container, chat, **SMALL, HABANA_STUB_CARDS="2")
    assert done.returncode == 0 and f"tokens {TOKENS}" in done.stdout, done.stderr
    (stack,) = (tmp_path / "c" / "cache" / "recipes").iterdir()
    assert {p.name for p in stack.iterdir()} == {"rank0", "rank1"}


@pytest.mark.long
def test_recipes_that_reuse_their_inputs_would_break_the_answer(tmp_path: Path) -> None:
    """Why it is refused: inputs are filled where they change, and the stub writes into those that it has read."""
    container = make(tmp_path / "c", "2.13.0+cpu", "1.24.2.31")
    reuse = (
        "from trencadis.backends.hpu.start import gaudi_mode_and_env\ngaudi_mode_and_env.refuse = lambda *args: None\n"
    )
    done = run(container, reuse + CHAT, **SMALL, PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE="1")
    assert f"tokens {TOKENS}" not in done.stdout
    done = run(container, CHAT, **SMALL, PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE="1")
    assert "scratch memory" in done.stderr and "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE=1" in done.stderr


REFUSALS = {
    "HABANA_STUB_PIN": ("", "plain", "refused"),
    "HABANA_STUB_OOM": ("", "", "", "", "2", "late:5", "11", "late:60"),
    "HABANA_STUB_GRAPH": ("", "2", "6", "late:9", "late:15"),
    "VLLM_T_COMPILE_FULLGRAPH": ("", "1"),
    "TRENCADIS_HPU_DECODE_LAYERS": ("", "1", "2"),
    "VLLM_FP32_SOFTMAX": ("", "1"),
}
"""What a card or a plug-in may refuse, and switches; the builtin of FusedSDPA is always there."""


COMPILE_ONCE = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))"


@pytest.mark.long
@pytest.mark.parametrize("release", ["1.20", "1.23", "1.24.1", "1.24.2"])
def test_40_starts_of_a_release_with_all_refusals_are_right_or_one_line(release: str, tmp_path: Path) -> None:
    """STARTS=4 makes fewer. Every start is a process with a cache of recipes of its own, in one container.

    All but the first of a run are forked from one that has imported torch and its compiler: half the time of a start.
    """
    (torch, plugin) = next((t, p) for t, p in PUBLISHED.items() if p.startswith(release))
    container, alone = make(tmp_path / "c", torch, plugin), [True]
    clean = container.variables(TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def start(number: int) -> int:
        rng = random.Random(f"{release} {number}")
        chosen = {name: rng.choice(values) for name, values in REFUSALS.items()}
        cache = {"TRENCADIS_CACHE": str(tmp_path / f"cache{number}")}
        environ = {**SMALL, **cache, **{k: v for k, v in chosen.items() if v}}
        done = run(container, CHAT_OR_LINE, **environ) if alone else fork(CHAT_OR_LINE, **environ)
        alone.clear()
        assert done.returncode == 0 and "Traceback" not in done.stderr, (chosen, done.stderr[-2000:])
        right = f"tokens {TOKENS}" in done.stdout
        (line,) = [""] if right else [t for t in done.stdout.splitlines() if t.startswith("line ")]
        refused = chosen["HABANA_STUB_GRAPH"] and chosen["VLLM_T_COMPILE_FULLGRAPH"]
        says = ("workspace Allocation of size", "compiler refuses")[: 2 if refused else 1]
        assert right or any(text in line for text in says), (chosen, line)
        assert not right or chosen["HABANA_STUB_GRAPH"] or WHOLE in done.stdout, (
            "only a graph that was refused is broken"
        )
        print(f"\n{release}, start {number}: {line or 'right'}", flush=True)
        return 1

    with fork_starts(clean, tmp_path, COMPILE_ONCE if release > "1.24" else "") as fork:
        run_in_pieces(f"starts of {release}", int(os.environ.get("STARTS", "40")), start)


# make serve in a container


SERVED = [v for v in PUBLISHED if PUBLISHED[v][:4] in ("1.20", "1.23") or v in ("2.11.0+cpu", "2.13.0+cpu")]


def container_python(folder: Path, torch: str, plugin: str) -> Path:
    """A Python whose site-packages are those of a container: everything of this machine's but its torch and ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    from importlib import metadata

    seen = {str(Path(str(d.locate_file("")))) for d in metadata.distributions()}
    for place in (Path(p) for p in sorted(seen)):
        for path in place.iterdir():
            ours = path.name.startswith(("torch", "functorch", "trencadis", "__editable__", "_", "pip", "zz_"))
            if path.suffix != ".pth" and not ours and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    put_torch(site, torch)
    put_plugin(site, plugin, torch.partition("+")[0])
    return folder / "bin" / "python"


def build_tools(folder: Path) -> Path:
    """What pip would fetch to build the package: the setuptools of this machine, before the environment's older one."""
    folder.mkdir()
    for path in Path(package_folder("setuptools")).parent.iterdir():
        if path.name.startswith(("setuptools", "_distutils_hack", "pkg_resources")):
            (folder / path.name).symlink_to(path)
    return folder


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def clone(tree: Path) -> Path:
    """The tracked files that a user of the clone needs, in an empty folder."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0"):
        if name and not name.startswith(("tests/", "docs/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


def offline(tmp_path: Path, made: Container) -> dict[str, str]:
    """The environment of a user in the container, whose pip reaches no index."""
    env = made.variables(PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", TRENCADIS_CACHE=str(tmp_path / "cache"))
    env["PATH"] = f"{tmp_path / 'python' / 'bin'}:/usr/bin:/bin:{env['PATH']}"
    env["PYTHONPATH"] = str(build_tools(tmp_path / "build"))
    return env


@contextlib.contextmanager
def typed(
    line: list[str], tree: Path, env: dict[str, str], log: Path, url: str, seconds: float = 300
) -> Iterator[None]:
    """A command that serves, until it answers; ended with all that it started."""
    with open(log, "w") as out:
        server = subprocess.Popen(line, cwd=tree, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + seconds
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=2) as reply:
                if reply.status == 200:
                    break
            time.sleep(0.3)
        yield
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error}: {log.read_text()[-6000:]}") from None
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.mark.long
@pytest.mark.parametrize("torch", SERVED)
def test_a_container_keeps_its_torch_through_make_serve_and_serves(torch: str, tmp_path: Path) -> None:
    """The steps of ``make serve`` with the network cut off: what pip would fetch it cannot.

    There is no C compiler, since the CPU's kernels, which the page below compiles, take minutes and a Gaudi no kernel.
    """
    container_python(tmp_path / "python", torch, PUBLISHED[torch])
    tree, port = clone(tmp_path / "tree"), free_port()
    env, log = offline(tmp_path, Container(tmp_path / "c", torch, PUBLISHED[torch])), tmp_path / "log"
    line, env["CC"] = ["make", "serve", f"VENV={tmp_path / 'env'}", f"PORT={port}"], "false"
    with typed(line, tree, env, log, f"http://127.0.0.1:{port}", 900):
        pass
    assert f"torch {torch} belongs to Gaudi's plug-in: the environment keeps it" in log.read_text()
    code = "import torch, trencadis; print(torch.__version__, torch.__file__)"
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run([str(tmp_path / "env/bin/python"), "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split()[0] == torch and str(tmp_path / "python") in done.stdout, done.stderr
    assert not list((tmp_path / "env").glob("lib/python*/site-packages/torch*"))


LIMITS = (
    "--dtype float32 --max-model-len 256 --max-num-seqs 2 --max-num-batched-tokens 128 --async-depth 0 "
    """--mm-processor-kwargs '{"max_pixels": 50176}'"""
)
"""What a stub that computes can warm up in minutes; the page's flags stay."""


@pytest.mark.long
@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.9.0+hpu_1.23.1-25.git8598e6d"])
def test_the_page_in_an_empty_folder_command_by_command(torch: str, tmp_path: Path) -> None:
    """As a new user of the newest release types docs/hpu.md, the demo standing for the reader's model."""
    page = (ROOT / "docs" / "hpu.md").read_text(encoding="utf-8")
    block = page.partition("Inside, in the folder of the clone:")[2].partition("```\n")[2].partition("```")[0]
    install, activate, check, *serving = block.strip().splitlines()
    assert len(serving) == 2 and all(" serve" in line for line in serving)
    container_python(tmp_path / "python", torch, PUBLISHED[torch])
    tree = clone(tmp_path / "tree")
    made = make(tmp_path / "c", None, None, cards=8)
    env = {**offline(tmp_path, made), **SMALL, "HABANA_STUB_GIB": "4"}
    done = subprocess.run(["bash", "-ec", install], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and f"torch {torch}" in done.stdout, done.stderr
    done = subprocess.run(["bash", "-ec", f"{activate}\n{check}"], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "modules 0-7" in done.stdout and ", 0 failed" in done.stdout, done.stdout
    for number, line in enumerate(serving):
        port, log = free_port(), tmp_path / f"serve{number}.log"
        line = line.replace("Qwen/Qwen2.5-VL-7B-Instruct", "assets/demo") + f" --port {port} {LIMITS}"
        command, url = ["bash", "-ec", f"{activate}\n{line}"], f"http://127.0.0.1:{port}"
        begun = time.monotonic()
        with typed(command, tree, env, log, url, 1200):
            print(f"\n{line}: ready after {time.monotonic() - begun:.0f} s")
            body = {"messages": [{"role": "user", "content": "How many circles are there?"}], "temperature": 0}
            requested = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps({**body, "max_tokens": 8, "return_token_ids": True}).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(requested, timeout=300) as reply:
                assert str(json.load(reply)["choices"][0]["token_ids"]) == TOKENS
        assert f"hpu: habana-torch-plugin {PUBLISHED[torch]}, torch {torch}" in log.read_text()
