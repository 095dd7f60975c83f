"""Links of the pages lead somewhere, the site holds every page, and each documented command is one that works."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import trencadis
from tools import gen_reference
from trencadis.assets import demo_path
from trencadis.core import devices
from trencadis.core.errors import StartupError
from trencadis.server.bench import bench_command as bench
from trencadis.server.cli import (
    chat_and_complete_commands,
    check_accuracy,
    check_backend_and_compare_model,
    check_device,
    quantize_and_merge_lora_commands,
)
from trencadis.server.cli import run_batch as batch
from trencadis.server.config import command_line_parser
from trencadis.server.plan import plan_command as plan

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OWN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
DESIGN = sorted((DOCS / "design").glob("*.md"))
PAGES = [*OWN, *sorted(DOCS.glob("*.md")), *DESIGN]
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
PROGRAMS = ("trencadis", "serve", "python", "pip", "make", "curl", "git", "docker", "pytest", "sh", "compute-sanitizer")
SPOKEN = re.compile(rf"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:export [A-Z]|(?:{'|'.join(PROGRAMS)})(?: |$)).*)$")
GENERATED = {DOCS / "reference" / f"{name}.md": text for name, text in gen_reference.pages().items()}


class Command(NamedTuple):
    """A line that a reader is told to type, and its page."""

    page: str
    line: str
    typed: bool = True
    """In a block of code; else a sentence names it, perhaps without all of its flags."""

    @property
    def words(self) -> list[str]:
        """Without variables, remarks and a second command."""
        words = shlex.split(self.line.split(" <<")[0], comments=True)
        words = words[: words.index("&&")] if "&&" in words else words
        return [w for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w) or (i and words[i - 1].startswith("-"))]


def fences(text: str) -> list[str]:
    """Bodies of code blocks in which commands stand: those without a language of their own."""
    plain = [m[2] for m in FENCE.finditer(text) if m[1] in ("", "sh", "bash", "shell", "console")]
    indented = [re.sub(r"(?m)^ {4}", "", m[0]) for m in re.finditer(r"(?m)(?:^ {4}\S.*\n)+", FENCE.sub("", text))]
    return plain + indented


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [(line, True) for body in fences(text) for line in body.replace("\\\n", " ").splitlines()]
        lines += [(line, False) for line in re.findall(r"(?<!`)`([^`\n]+ [^`\n]+)`(?!`)", FENCE.sub("", text))]
        said = ((SPOKEN.match(line), typed) for line, typed in lines if not line.startswith("trencadis:"))
        found += [Command(page.name, m[1], typed) for m, typed in said if m]
    return found


def anchors(text: str) -> set[str]:
    """Of a page's headings, as the sites that show Markdown make them."""
    plain = (re.sub(r"[`*\[\]]|\([^)]*\.md[^)]*\)", "", h) for h in HEADING.findall(FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in plain}


def text_of(path: Path) -> str | None:
    """Of a page, which may be one that the site's build makes; None where there is no such file."""
    if path in GENERATED:
        return GENERATED[path]
    return path.read_text(encoding="utf-8") if path.is_file() else None


def broken(page: Path, text: str) -> list[str]:
    """Links of ``text`` that lead nowhere."""
    wrong = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if path.is_dir() and not anchor:
            continue
        if path.suffix not in (".md", "") and path.is_file():
            continue
        found = text_of(path)
        if found is None or (anchor and anchor not in anchors(found)):
            wrong.append(f"{page.name}: {target}")
    return wrong


def test_every_internal_link_leads_somewhere() -> None:
    assert [w for page in PAGES for w in broken(page, page.read_text(encoding="utf-8"))] == []
    assert [w for page, text in GENERATED.items() for w in broken(page, text)] == []


def test_a_broken_link_is_found() -> None:
    text = "[a](nothing.md) [b](images.md#no-such-part) [c](../README.md#two-commands) [d](#here)\n\n## Here\n"
    page = DOCS / "x.md"
    assert broken(page, text.replace("(#here)", "(../docs)")) == ["x.md: nothing.md", "x.md: images.md#no-such-part"]


def test_pages_without_an_address_of_their_own_name_none() -> None:
    """The repository's address is left open; a badge or a site that nobody has would be a lie."""
    for page in (*OWN, *(ROOT / ".github").rglob("*.*"), ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!127\.0\.0\.1|example\.org|keepachangelog\.com|semver\.org)", text), page.name


def test_the_site_holds_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {line for m in FENCE.finditer(index.replace("{toctree}", "toctree")) for line in m[2].splitlines()}
    named = {p.stem for p in DOCS.glob("*.md")} - {"index"} | {f"reference/{p.stem}" for p in GENERATED}
    named |= {f"design/{p.stem}" for p in DESIGN}
    assert {line for line in listed if line and not line.startswith(":")} == named


def test_pages_are_few_and_design_notes_short() -> None:
    assert len([*DOCS.glob("*.md")]) <= 30
    lines = {p.name: p.read_text(encoding="utf-8").count("\n") for p in [*DESIGN, DOCS / "architecture.md"]}
    assert {name: n for name, n in lines.items() if n > 150} == {}


def test_the_reference_names_everything() -> None:
    made = {page.stem: text for page, text in GENERATED.items()}
    assert [n for n in trencadis.__all__ if not n.startswith("_") and f":: {n}\n" not in made["python-api"]] == []


NEEDS = {
    r"git clone|pip install|pre-commit install": "a network",
    r"curl |trencadis chat": "a server that runs",
    r"docker |compute-sanitizer ": "a card",
    r"python -m vllm": "vLLM",
    r"export ": "a shell",
    r"python -m tests\.native\.sanitizers": "a C compiler with sanitizers",
}
"""Commands that no test can run, and what they need. Their flags are checked all the same where they are ours."""


def own_flags(command: Command) -> None:
    """Parses the words with the parser that the command itself uses; raises where a flag or a value is wrong."""
    program, *words = command.words
    if program == "python":
        words = words[words.index("-m") + 2 :]
        program = "serve" if not words or words[0] == "serve" or words[0].startswith("-") else words[0]
    name = words.pop(0) if words and program != "serve" else "serve"
    words = words[1:] if program == "serve" and words[:1] == ["serve"] else words
    if name == "serve":
        command_line_parser.parse(words)
    elif name == "plan":
        memory = [] if command.typed else ["--memory", "96GiB"]
        command_line_parser.parse(plan._parse_options([*words, *memory])[1])
    elif name == "chat":
        chat_and_complete_commands.parse_arguments(words)
    elif name == "quantize":
        given = quantize_and_merge_lora_commands.parse(words)
        assert len(given.names) == 2 and quantize_and_merge_lora_commands.check_options(given.values), command
    elif name == "merge-lora":
        assert len(words) == 3 or not (words or command.typed), command
    elif name == "check-backend":
        check_backend_and_compare_model.parse(words or ["numpy"])
    elif name == "check-model":
        assert check_backend_and_compare_model.parse_model_options(words).path or not command.typed, command
    elif name == "check-accuracy":
        check_accuracy.parse(words)
    elif name == "check-device" or name.removeprefix("check-") in devices.BUILT:
        check_device.parse(words, name.removeprefix("check-").replace("device", ""))
    elif name == "run-batch":
        _, rest = batch.parser().parse_known_args([*words, *(() if command.typed else ("-i", "x", "-o", "y"))])
        command_line_parser.parse(rest)
    elif name == "bench":
        assert not words or words[0] in bench.BENCHMARKS, command  # tests/bench parses the rest
    elif name == "key":
        assert words[0] == "new" and len(words) <= 2, command
    else:
        assert name in ("devices", "models", "collect-env", "complete", "version", "--version"), command


def files_exist(command: Command) -> None:
    """Scripts and test files are there, and each option stands in the script's text."""
    files = [w for w in command.words[1:] if re.match(r"(tests|tools|dist)/", w)]
    assert all((ROOT / f).exists() or f.startswith("dist/") for f in files), command
    for script in (f for f in files if f.startswith("tools/")):
        text = (ROOT / script).read_text(encoding="utf-8")
        text += "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tools" / "demo").glob("*.py"))
        missing = [w for w in command.words if w.startswith("--") and f'"{w}"' not in text]
        assert not missing, f"{command}: {missing}"


def targets_exist(command: Command) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in command.words[1:]:
        name, sign, _ = word.partition("=")
        assert re.search(rf"(?m)^{name}(?: \?=|:=)" if sign else rf"(?m)^{name}:", text), command


def extras_exist(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"\[(\w+)\]", command.line):
        assert extra in project["optional-dependencies"], command


CHECKS = (
    (r"(trencadis|serve)\b|python (-P )?-m trencadis\.server", own_flags),
    (r"make\b", targets_exist),
    (r"(python -m )?pytest |python tools/|sh tools/", files_exist),
    (r"pip install", extras_exist),
)
ELSEWHERE = r"python (-P )?(-m )?benchmarks|python -c "
"""``test_documented_commands`` runs these."""


def plain(command: Command) -> str:
    """The line without variables."""
    return re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command.line)


@pytest.mark.parametrize("page", sorted({c.page for c in commands()}))
def test_every_documented_command_is_checked_or_says_what_it_needs(page: str) -> None:
    for command in (c for c in commands() if c.page == page):
        checks = [run for pattern, run in CHECKS if re.match(pattern, plain(command))]
        known = any(re.match(pattern, plain(command)) for pattern in (*NEEDS, ELSEWHERE))
        assert checks or known, f"{command}: no test knows this command"
        for run in checks:
            run(command)


WRONG = {
    "trencadis serve --no-such-flag 3": StartupError,
    "trencadis serve --port many": StartupError,
    "trencadis check-backend numpy --nothing": StartupError,
    "trencadis check-hpu --nothing": StartupError,
    "trencadis quantize MODEL OUT --to int3": StartupError,
    "make nothing": AssertionError,
    "python tools/hardware.py --nothing": AssertionError,
    "python -m pytest tests/nothing": AssertionError,
    "pip install 'trencadis[nothing]'": AssertionError,
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_is_found(line: str) -> None:
    run = next(run for pattern, run in CHECKS if re.match(pattern, line))
    with pytest.raises(WRONG[line]):
        run(Command("x.md", line))


def run_on_the_demo(words: list[str], cache: Path) -> str:
    """The command as it stands, where no start has measured anything; the demo stands for the reader's checkpoint."""
    demo = [str(demo_path()) if w.startswith(("./", "assets/demo")) else w for w in words]
    line = [sys.executable, "-m", "trencadis.server.cli.main", *demo]
    env = os.environ | {"TRENCADIS_CACHE": str(cache)}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documented_plans() -> list[str]:
    return sorted({" ".join(c.words[1:]) for c in commands() if c.typed and c.words[:2] == ["trencadis", "plan"]})


def test_the_tutorials_plan_is_what_the_program_prints(tmp_path: Path) -> None:
    page = (DOCS / "hpu.md").read_text(encoding="utf-8")
    text = page.partition("## Tutorial")[2].partition("\n## ")[0]
    words = next(c.words for c in commands() if c.page == "hpu.md" and c.words[1:2] == ["plan"])
    printed = run_on_the_demo(words[1:], tmp_path).splitlines()
    rows = [line for m in FENCE.finditer(text) if m[1] == "text" for line in m[2].splitlines()]
    assert len(rows) > 15 and [row for row in rows if row.rstrip() not in [p.rstrip() for p in printed]] == []


@pytest.mark.long
@pytest.mark.parametrize("line", [p for p in documented_plans() if "mistral" not in p and "Qwen/" not in p])
def test_every_documented_plan_runs(line: str, tmp_path: Path) -> None:
    assert "KV cache" in run_on_the_demo(line.split(), tmp_path)


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx"), pytest.importorskip("furo"), pytest.importorskip("myst_parser")
    line = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of a server of the demo, as ``make serve`` starts one, on a port that is free."""
    line = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", "0", "--dtype", "float32"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = iter(server.stderr)
        url = next(m[1] for m in map(re.compile(r"listening on (http://127\.0\.0\.1:\d+)").search, lines) if m)
        next(text for text in lines if "Application startup complete" in text)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def shown(language: str, mark: str) -> str:
    """The first block of the first tutorial that holds ``mark``."""
    text = (DOCS / "getting-started.md").read_text(encoding="utf-8")
    return next(m[2] for m in FENCE.finditer(text) if m[1] == language and mark in m[2])


def typed(program: list[str], text: str, url: str) -> str:
    done = subprocess.run(
        program, input=text.replace("http://127.0.0.1:8000", url), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_first_tutorial_answers_as_it_says(served: str) -> None:
    page, readme = (p.read_text(encoding="utf-8") for p in (DOCS / "getting-started.md", ROOT / "README.md"))
    answer = json.loads(typed(["bash"], shown("", "curl"), served))
    said = answer["choices"][0]["message"]["content"]
    assert f"> {said}\n" in page and f"> {said}\n" in readme
    usage = answer["usage"]
    tokens = usage["prompt_tokens_details"]["image_tokens"], usage["prompt_tokens"]
    assert f"the image took {tokens[0]} of the {tokens[1]} tokens" in page
    again = json.loads(typed(["bash"], shown("", "curl"), served))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert f"It prints `{typed([sys.executable], shown('python', 'OpenAI'), served)}`" in page
    assert f"It prints `{typed([sys.executable], shown('python', 'LLM('), served).strip()}`" in page


@pytest.mark.long
def test_the_terminal_talks_to_the_server(served: str) -> None:
    line = [sys.executable, "-m", "trencadis.server.cli.main", "chat", "--url", served]
    line += ["--image", str(ROOT / "assets" / "demo_picture.png"), "What shape is the red one?"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "circle" in done.stdout, done.stderr
