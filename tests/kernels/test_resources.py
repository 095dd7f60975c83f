"""Kernels compile ahead of time and stay within registers and shared memory; in a process that does not interpret."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.oracles.layers.compiled_layers import SCRIPT, apart, facts, wrong
from tools import kernel_resources
from tools.compiled import assembly
from tools.compiled.table import (
    CARDS,
    DATA,
    PAGE,
    Report,
    compiled_lines,
    markdown,
    may_wait,
    merged,
    report_of,
    rows,
    stored,
    update_page,
    written,
)
from tools.kernel_resources import faults
from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.tile_sizes import TileEntry

ROOT = Path(__file__).resolve().parents[2]


def tool(file: Path, *args: str) -> list[Report]:
    command = [sys.executable, str(ROOT / "tools" / "kernel_resources.py"), "--json", str(file), *args]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [Report(**r) for r in json.loads(file.read_text())]


def test_a_sample_compiles(tmp_path: Path) -> None:
    found = tool(
        tmp_path / "r.json", "--arch", "86", "--kernels", "attend_decode", "--match", "bfloat16 head 64 block 16"
    )
    assert [r.kernel for r in found] == ["items_kernel", "join_kernel"]
    for r in found:
        assert 16 <= r.registers < 256 and r.stack == 0 and 0 < r.shared <= 99 << 10 and 0 < r.occupancy <= 1


@pytest.mark.long
def test_everything_compiles(tmp_path: Path) -> None:
    """Every entry of every table, every architecture; ends with 1 where 16-bit attention spills."""
    found = tool(tmp_path / "r.json", "--jobs", "2")
    spilling = sorted({f"{r.kernel} {r.case} sm_{r.arch}: {r.stack}" for r in found if r.stack})
    print(f"\n{len(found)} compilations; float32 kernels that spill: {spilling or 'none'}")


KEYS = """
import torch
from tests.oracles.attention_cases import Case, packed, prepared, IMAGES, WINDOWS
from tools.kernel_resources import record
from trencadis.backends.cuda.kernels import rotary_kernels

rotary_kernels.rotary = lambda *args: None  # cannot run where nothing is interpreted
device = torch.device("cpu")
keys = {}

def note(kind, run):
    for x in record(run):
        key = (sorted(x.signature.items()), sorted(x.constants.items()), x.divisible, sorted(x.options.items()))
        keys.setdefault((kind, x.kernel.__name__), set()).add(str(key))

for context, count, spare in ((0, 1, 15), (7, 16, 16), (300, 33, 0), (31, 96, 28)):
    ready = prepared(Case(((context, count), (5, 3)), spare=(0, spare)), device)
    note("prefill", ready.run)
for context, count in ((0, 125), (300, 400)):
    note("prefill of some hundreds", prepared(Case(((context, count), (5, 3)), spare=(0, 0)), device).run)
for rows in (2, 3, 8, 16):
    ready = prepared(Case(((40, 1),) * rows, decode=True, spare=(0, 0)), device)
    note("decode", ready.run)
for windows in (1, 2, 5, 8):
    launch = packed([[64] * windows], 2, 16, torch.float16, device)[0]
    note("vision", lambda: (launch.run(IMAGES), launch.run(WINDOWS)))
assert len(keys) == 11, sorted(keys)
for name, found in keys.items():
    assert len(found) == 1, (name, found)
print("one key each")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One process for two tests: most of its time is importing."""
    return apart(SCRIPT + KEYS, tmp_path_factory.mktemp("triton"), "bfloat16 7B, output", "90")


def test_no_launch_asks_for_another_compilation(said: str) -> None:
    """What Triton's cache is keyed by is the same for all lengths, and for all buckets of a class of tiles.

    Not for a bucket of one token: torch rewrites the strides of a dimension of 1, so it has a key of its own.
    """
    assert "one key each" in said


def test_a_product_on_hopper_waits_and_loads_16_bytes(said: str) -> None:
    """With all stages of the pipeline in 16-byte copies: nothing narrower brings a weight."""
    (found,) = facts(said)
    assert wrong(found) == "", found
    assert found["copies"] == {"16": 24} and (found["waits"], found["tells"], found["fetched"]) == (1, 1, 2), found
    for changed, said in (
        ({"waits": 0}, "0 waits"), ({"stack": 8}, "spills 8"), ({"fetched": 0}, "fetches no"),
        ({"copies": {"16": 8, "8": 16}}, "copies {16: 8, 8: 16}"), ({"copies": {"16": 12}}, "where weights take 16"),
        ({"arch": 86}, "1 waits and 1 permissions on sm_86"),
    ):  # fmt: skip
        assert said in wrong({**found, **changed})


def test_faults_are_named() -> None:
    good = Report("bfloat16 head 64", "items_kernel", 86, 128, 0, 50 << 10, 4)
    assert not faults([good])
    assert good.occupancy == 4 / 48
    for changed, said in (
        ({"stack": 8}, "spills 8 bytes"),
        ({"shared": 100 << 10}, "shared memory of 101376"),
        ({"error": "no"}, "no"),
    ):
        assert said in faults([Report(**{**vars(good), **changed})])[0]
    assert not faults([Report(**{**vars(good), "case": "float32 head 64", "stack": 8})])
    for kernel in ("pictures_kernel", "pictures_join_kernel"):
        assert "spills 8 bytes" in faults([Report(**{**vars(good), "kernel": kernel, "stack": 8})])[0]
    assert "**stack 8**" in markdown(rows([Report(**{**vars(good), "stack": 8})], "3"))


OLDER_SPILLS, OLDER_SPILLING = 32, 40
"""Bytes that 16-bit attention spills at most by a version of Triton before the newest, and how many launches do."""


def test_no_line_of_the_data_file_breaks_a_rule() -> None:
    """By the newest version of Triton 16-bit attention and products spill on no architecture, by an older one a few of
    small tiles, 32 bytes at most; everything fits, and every line has a key.
    """
    newest = max((r["triton"] for r in stored()), key=lambda v: [*map(int, v.split("."))])
    lines = stored()
    found = [report_of(r) for r in lines if r["triton"] == newest]
    assert faults(found) == []
    older = [report_of(r) for r in lines if r["triton"] != newest]
    assert faults([r for r in older if not 0 < r.stack <= OLDER_SPILLS]) == []
    assert sum(line.endswith("bytes a thread") for line in faults(older)) <= OLDER_SPILLING
    assert [f"{r.case} ({r.kernel}) on sm_{r.arch}" for r in found if not r.key] == []
    assert {r.arch for r in found} == set(CARDS) and len(found) > 3000


def test_the_data_file_knows_every_tile() -> None:
    """Tables that changed without ``tools/kernel_resources.py --write`` are found out."""
    known = {(r["kernel"], r["tile"], r["warps"], r["stages"]) for r in stored()}
    for path in sorted((ROOT / "backends" / "cuda" / "kernels" / "tiles").glob("*.csv")):
        text = path.stem.startswith(("attend_prefill", "attend_decode"))
        kernel = "items_kernel" if text else f"{path.stem.removeprefix('attend_')}_kernel"
        for line in path.read_text().splitlines()[1:]:
            *_, m, n, warps, stages = line.split(",")
            kernels = kernel, kernel.replace("experts_kernel", "experts_down_kernel")
            assert any((name, f"{m}x{n}", warps, stages) in known for name in kernels), f"{path.name}: {line}"


ATTENTION = {"items_kernel": "", "windows_kernel": "attend_windows", "images_kernel": "attend_images",
             "pictures_kernel": "attend_pictures"}  # fmt: skip


def test_the_bound_of_shared_memory_holds_what_the_compiler_takes() -> None:
    """It is what every import of the tables checks, so it must not be below what a launch asks for."""
    assert {arch: card.shared for arch, card in CARDS.items()} == tile_sizes.SHARED
    seen = 0
    for r in stored():
        if r["kernel"] not in ATTENTION or r["error"]:
            continue
        codes = "_codes" if r["case"].endswith(("int8", "fp8")) else ""
        head, bits = int(r["case"].split("head ")[1].split()[0]), 32 if "float32" in r["case"] else 16
        m, n = map(int, r["tile"].split("x"))
        tile = tile_sizes.Tile(m, n, int(r["warps"]), int(r["stages"] or 1))
        kind = "attend_prefill" if {"short", "long"} & {*r["case"].split()} else "attend_decode"
        name = (ATTENTION[r["kernel"]] or kind) + codes
        bound = tile_sizes.need(name, TileEntry(int(r["arch"]), bits, head, 1, "", tile))
        assert float(r["shared_kib"]) * 1024 <= bound, r
        seen += 1
    assert seen > 900


HEAD = ("parts_kernel", "draw_kernel", "told_kernel", "greedy_parts_kernel", "greedy_pick_kernel")


def test_registers_leave_the_head_half_of_a_processor() -> None:
    """Launches of 256 rows have more programs than processors hold: what registers leave free is what hides waiting. By
    the newest version of Triton.
    """
    seen = set()
    newest = max((r["triton"] for r in stored()), key=lambda v: [*map(int, v.split("."))])
    for r in stored():
        if r["kernel"] in HEAD and r["triton"] == newest:
            card, warps = CARDS[int(r["arch"])], int(r["warps"])
            each = -(-int(r["registers"]) // 8) * 8 * 32 * warps
            assert 65536 // each * warps >= card.warps / 2, r
            seen.add(r["kernel"])
    assert seen == set(HEAD)


def test_a_tile_that_cannot_fit_is_found_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer card of the newest architecture has less shared memory than a data centre's of the one before."""
    lines = [",".join((*tile_sizes.TileEntry._fields[:-1], *tile_sizes.Tile._fields))]
    lines += [f"{arch},16,128,1,any,128,64,8,4" for arch in (100, 120)]
    (tmp_path / "attend_images.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(tile_sizes, "FOLDER", tmp_path)
    caches = tile_sizes.table, tile_sizes.entries
    try:
        [cached.cache_clear() for cached in caches]
        tile_sizes.check("attend_images", 100)
        with pytest.raises(ImportError, match=r"attend_images\.csv: .* for sm_120, 16 bits, heads of 128 takes \d+"):
            tile_sizes.check("attend_images", 120)
    finally:
        [cached.cache_clear() for cached in caches]


def test_the_page_is_made_from_the_data_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == update_page(page, stored()), "run tools/kernel_resources.py --page"
    assert DATA.read_text(encoding="utf-8") == written(stored())


def test_lines_of_two_versions_stand_beside_each_other() -> None:
    """The page sums up the newest version; the table of waits has both."""
    one = Report("bfloat16 head 64", "items_kernel", 90, 128, 0, 50 << 10, 8, key="a", wait=assembly.GUARDED)
    first = rows([one], "3.9.0")
    both = merged(rows([replace(one, key="b", wait=assembly.NO_WAIT, registers=255)], "3.10.1"), first)
    assert [r["triton"] for r in both] == ["3.9.0", "3.10.1"]
    page = markdown(both)
    assert "| `items_kernel` | 1: 255 reg" in page and "| kernel | Triton 3.9.0 | Triton 3.10.1 |" in page
    assert page.endswith("| `items_kernel` | 1 behind a barrier | 1 without such waits |\n")
    assert "Waits" not in markdown(rows([replace(one, wait="")], "3.9.0"))


def test_waits_that_were_not_read_are_not_known() -> None:
    """Of two warp groups on sm_90; elsewhere there are none."""
    one = Report("bfloat16 head 64", "items_kernel", 90, 128, 0, 50 << 10, 8, key="a")
    found = [
        one,
        replace(one, key="b", wait=assembly.NO_WAIT),
        replace(one, key="c", arch=80),
        replace(one, key="d", warps=4),
    ]
    assert set(compiled_lines(rows(found, "3.9.0"))) == {"b", "c", "d"}


def test_keys_that_match_no_source_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any version; and launches that the installed version has no line of."""
    launches = [(f"case {i}", SimpleNamespace(kernel=SimpleNamespace(__name__="join_kernel")), 90) for i in range(3)]
    monkeypatch.setattr(kernel_resources, "_launches", lambda part: launches)
    monkeypatch.setattr(
        kernel_resources, "key_of", lambda x, arch, v: f"{v} {[y is x for _, y, _ in launches].index(True)}"
    )
    old = Report("case 0", "join_kernel", 90, 32, warps=4, key="older source")
    held = [*rows([replace(old, key="1.2 0"), replace(old, case="case 1", key="1.2 1")], "1.2"),
            *rows([replace(old, key="1.1 0"), replace(old, case="case 9")], "1.1")]  # fmt: skip
    monkeypatch.setattr(kernel_resources, "stored", lambda: held)
    assert kernel_resources.mismatches("1.2") == [
        "case 2 (join_kernel) on sm_90: not compiled by 1.2",
        "case 9 (join_kernel) on sm_90, 1.1: older source is of no launch",
    ]


def test_no_two_warp_groups_share_memory_without_a_barrier() -> None:
    """Every launch that may, compiled by the oldest Triton that is supported and by the newest."""
    found = [r for r in stored() if may_wait(r["kernel"], int(r["arch"]), int(r["warps"]))]
    assert [r for r in found if r["wait"] in ("", assembly.UNGUARDED)] == []
    versions = {r["triton"] for r in found}
    assert len(versions) == 2
    assert len({len([r for r in found if r["triton"] == v]) for v in versions}) == 1, "one was not compiled for all"


CODES = {
    r"bfloat16 int4": 4.0, r"float16 fp8, down": 2.0, r"bfloat16 int4.* 8 rows": 3.2, r"float16 int4.* 8 rows": 3.75,
    r"bfloat16 fp8": 3.1, r"bfloat16 fp8.* 8 rows": 2.6, r"float16 fp8.* 8 rows": 2.1, r"bfloat16 fp8 by fp8": 2.0,
    r"float16 int4, .*, down": 3.3, r"float16 int4": 4.6,
}  # fmt: skip
"""What cases begin with -> most instructions of a trip for each of their codes."""


def test_few_instructions_for_each_code() -> None:
    """All of a trip's, loads and products included, on sm_90 in 16 bits: a trip has 128 columns of the tile's
    features.
    """
    seen = 0
    for r in stored():
        if r["kernel"] == "coded_skinny_kernel" and r["arch"] == "90":
            codes = 128 * int(r["tile"].split("x")[1]) * (2 if "gate" in r["case"] else 1) / (32 * int(r["warps"]))
            for name, most in CODES.items():
                if re.match(name, r["case"]):
                    assert int(r["trip"]) / codes <= most, r
                    seen += 1
    assert seen >= 30


# Waits for products by warp groups

LOOP = """
mov.u32 %r1, 0;
$L__BB0_2:
{before}
cp.async.wait_group 1;
bar.sync 0;
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f1}}, %rd1, %rd2, p, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{after}
@%p1 bra $L__BB0_2;
{behind}
ret;
"""
COPY, STORE = "cp.async.cg.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x10, %r3;", "st.shared.v4.b32 [%r2], {%r4};"


@pytest.mark.parametrize(
    ("before", "after", "behind", "want"),
    [
        ("", "bar.sync 0;\n" + STORE, "", "barrier"),
        ("", COPY, "", "stage"),  # the barrier of the loop keeps the groups within a trip of each other
        ("", STORE, "", "none"),
        (STORE, "", "", "none"),  # at the beginning of the next trip
        (COPY, "", "", "stage"),
        ("", "", STORE, "none"),
        ("", "", "bar.sync 0;\n" + STORE, "barrier"),
        ("", "bar.sync 1, 128;\n" + STORE, "", "none"),  # a barrier of one group
        ("", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r4};", "", "none"),
    ],
)
def test_what_stands_behind_a_wait(before: str, after: str, behind: str, want: str) -> None:
    assert assembly.guard(LOOP.format(before=before, after=after, behind=behind)) == want


def test_values_that_threads_exchange_are_no_operand() -> None:
    """Block ids go through words of their own: the loop loads them again at the offset at which it stored them."""
    store, load = "st.shared.b32 \t[%r52+98304], %r3;", "ld.shared.b32 \t%r9, [%r53+98304];"
    assert assembly.guard(LOOP.format(before="", after=f"{store}\nbar.sync 0;\n{load}", behind="")) == "exchange"
    assert assembly.guard(LOOP.format(before="", after=f"{store}\nbar.sync 0;", behind="")) == "none"
    assert assembly.guard(LOOP.format(before="", after="", behind=f"{store}\nbar.sync 0;\n{load}")) == "none"
    mixed = f"{store}\n{STORE}\nbar.sync 0;\n{load}"
    assert assembly.guard(LOOP.format(before="", after=mixed, behind="")) == "none"


def test_kernels_without_warp_groups_have_no_waits() -> None:
    assert assembly.guard("bar.sync 0;\nst.shared.b32 [%r1], %r2;\n") == ""


def test_instructions_of_a_trip() -> None:
    """The innermost loop with products, not the one around it nor the longer one without."""
    lines = [
        "MOV R1, c[0x0][0x28]", "NOP", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "IADD3 R1, R1, 1, RZ",
        "@P0 BRA 0x20", "IADD3 R2, R2, 1, RZ", "FADD R3, R3, R3", "FADD R3, R3, R3", "FADD R3, R3, R3",
        "@P1 BRA 0x60", "@P2 BRA 0x10", "EXIT", "BRA 0xc0",
    ]  # fmt: skip
    sass = "\n".join(f"        /*{16 * i:04x}*/            {text} ;  /* 0x000 */" for i, text in enumerate(lines))
    assert assembly.trip_instructions(sass) == 3
    assert assembly.trip_instructions(sass.replace("@P0 BRA 0x20", "BRA.U UP0, 0x20")) == 3
    assert assembly.trip_instructions("/*0000*/ EXIT ;") == 0
