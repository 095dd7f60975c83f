"""``trencadis plan``: ledger, shapes, images and advice without weights or device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trencadis.backends.cuda.shape_policy import sum_bytes as cuda_sum_bytes
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.memory import graph_measurement_cache
from trencadis.server.cli.main import main

GUIDE = ("--max-num-seqs", "128", "--max-num-batched-tokens", "32768", "--max-model-len", "32768")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of Qwen2.5-VL-72B, and nothing else."""
    path = tmp_path_factory.mktemp("qwen") / "Qwen2.5-VL-72B"
    path.mkdir()
    content = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 128000, "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "dtype": "bfloat16",
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3456, "out_hidden_size": 8192,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "measured"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["plan", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def report(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json"))
    return found


def test_kernels_of_a_card_are_compiled_once_for_all_shapes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Gaudi compiles each shape, which takes minutes; a card's estimate is a base for each stage and captures."""
    words = (model, "--memory", "200GiB", *GUIDE)
    card, gaudi = (report(capsys, *words, "--device", device) for device in ("cuda", "hpu"))
    stages = len(card["buckets"])
    each = 0.05 + 0.006 * 80
    planned = sum(map(len, card["buckets"].values()))
    assert 10 * stages < card["warmup_seconds"] <= 10 * stages + each * planned
    assert gaudi["warmup_seconds"] > 10 * card["warmup_seconds"]


def refused(capsys: pytest.CaptureFixture[str], words: Sequence[object]) -> str:
    assert main(["plan", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trencadis: ") and error.count("\n") == 1
    return error


def test_72b_on_eight_devices_in_under_five_seconds(model: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trencadis.server.cli.main", "plan", str(model), "--device", "hpu",
         "--memory", "96GiB", "-tp", "8", *GUIDE, "--json"],
        env={"PYTHONPATH": str(root), "HOME": "/nonexistent"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert time.perf_counter() - begun < 5
    found = json.loads(done.stdout)
    assert found["graphs"]["planned"] == sum(len(b) for b in found["buckets"].values()) < 220
    assert sum(row["bytes"] for row in found["ledger"]) == found["total"] == (96 << 30) - (384 << 20), "less HCCL's"
    weights = next(row["bytes"] for row in found["ledger"] if row["name"] == "weights")
    whole = 152064 * 8192 * 2  # every rank holds the embedding
    assert 72e9 * 2 / 8 * 0.95 < weights - whole * 7 / 8 < 75e9 * 2 / 8


def test_tables(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, *GUIDE)
    for part in (
        "KV cache",
        "graph reserve unused",
        "margin",
        "fresh",
        "context",
        "decode",
        "by formula, not measured",
    ):
        assert part in text
    assert any(line.split()[:4] == ["1920x1080", "1932x1092", "10764", "11520"] for line in text.splitlines())


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("utilisation", [0.3, 0.75, 0.99])
def test_every_device_sums(model: Path, device: str, utilisation: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, model, "--device", device, "--memory", "400GiB", "-tp", 8, "--gpu-memory-util", utilisation)
    others = next(row["bytes"] for row in found["ledger"] if row["name"] == "used by others")
    if device == "cpu":
        assert others > 0, "ranks share the memory of a machine"
    else:
        assert others == (cuda_sum_bytes(8) if device == "cuda" else 0), "buffers of sums over ranks"
    left_out = (384 << 20) if device == "hpu" else 0  # to HCCL
    assert sum(row["bytes"] for row in found["ledger"]) == (400 << 30) - left_out
    assert bool(found["buckets"]) is (device != "cpu") and found["kv_blocks"] > 0
    if device == "cuda":
        assert set(found["buckets"]) == {"prefill", "decode", "vision", "sample", "reset"}
        assert {b["dims"][1] for b in found["buckets"]["prefill"]} == {16, 256}


def test_min_and_max_pixels_drive_the_buckets(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = '{"min_pixels": 401408, "max_pixels": 802816}'
    found = report(capsys, model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, "--mm-processor-kwargs", limits)
    slots = [b["dims"][0] for b in found["buckets"]["vision"]]
    assert min(slots) == 3136 and all(i["patches"] >= 2048 for i in found["images"])
    assert all(i["slots"] <= i["bucket"] and i["planned"] for i in found["images"])


def test_resize_alignment_fills_every_window(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [model, "--device", "hpu", "--memory", "96GiB", "-tp", 8]
    images = report(capsys, *words, "--image-alignment", "resize")["images"]
    assert all(i["slots"] == i["patches"] and i["planned"] for i in images)
    assert all(int(side) % 112 == 0 for i in images for side in i["resized"].split("x"))
    assert any(i["slots"] > i["patches"] for i in report(capsys, *words)["images"])
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "1600")
    notes = report(capsys, *words, "--image-alignment", "resize")["notes"]
    assert any("672x672 pixels (2304 patches, 2304 slots) is the smallest square" in note for note in notes)


def test_the_guides_vision_list_and_an_image_above_it(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "1600, 3136, 4096")
    found = report(capsys, model, "--device", "hpu", "--memory", "96GiB", "-tp", 8)
    assert [b["dims"] for b in found["buckets"]["vision"]] == [[1600], [3136], [4096]]
    assert not found["images"][-1]["planned"] and any("ends at 4096" in n for n in found["notes"])
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "1600,1000")
    assert "'1000' must be" in refused(capsys, [model, "--device", "hpu", "--memory", "96GiB"])


def test_a_start_that_cannot_fit_names_what_would(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, *GUIDE]
    error = refused(capsys, [*words, "--gpu-memory-utilization", "0.01"])
    fits = error.split("--gpu-memory-utilization ")[2].split(" fits")[0]
    assert report(capsys, *words, "--gpu-memory-utilization", fits)["kv_blocks"] >= 256
    assert "before the KV cache; --quantization fp8 fits" in refused(capsys, [*words[:5], *GUIDE])


@pytest.fixture
def few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cuts a launch, so that some reserve holds what all graphs keep."""
    monkeypatch.setenv("VLLM_CONFIG_HIDDEN_LAYERS", "40")


def test_the_reserve_that_is_advised_holds_the_plan(
    model: Path, few_cuts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model, "--device", "hpu", "--memory", "240GiB", *GUIDE]
    small = report(capsys, *words, "--graph-reserved-mem", "0.02")
    assert small["graphs"]["captured"] < small["graphs"]["planned"]
    line = next(n for n in small["notes"] if "holds the plan" in n)
    value = line.split("VLLM_GRAPH_RESERVED_MEM=")[1].split()[0]
    full = report(capsys, *words, "--graph-reserved-mem", value)
    assert full["graphs"]["captured"] == full["graphs"]["planned"]


def test_an_unused_reserve_is_named_with_the_blocks_that_it_would_be(
    model: Path, few_cuts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model, "--device", "hpu", "--memory", "240GiB", *GUIDE]
    large = report(capsys, *words, "--graph-reserved-mem", "0.6")
    line = next(n for n in large["notes"] if "unused" in n)
    value = line.split("VLLM_GRAPH_RESERVED_MEM=")[1].split()[0]
    blocks = int(line.split("into ")[1].split()[0])
    right = report(capsys, *words, "--graph-reserved-mem", value)
    assert right["kv_blocks"] - large["kv_blocks"] == blocks
    assert right["graphs"] == large["graphs"] and not any("reserve" in n for n in right["notes"])


def test_graphs_without_a_tensor_cache_keep_next_to_nothing(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in's own variable, in its own words: 1 switches the cache off, any other text leaves it on."""
    words = [model, "--device", "hpu", "--memory", "240GiB", *GUIDE]
    cost = {}
    for text in ("", "0", "false", "true", "1"):
        monkeypatch.setenv("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", text)
        found = report(capsys, *words)
        cost[text] = sum(b["bytes"] for stage in found["buckets"].values() for b in stage)
    assert cost[""] == cost["0"] == cost["false"] == cost["true"] > 1000 * cost["1"] > 0


def test_eager_captures_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, "--enforce-eager")
    assert found["graphs"]["captured"] == 0 and all(p["budget"] == 0 for p in found["pools"].values())


def test_flags_win_over_variables(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.4")
    monkeypatch.setenv("VLLM_GRAPH_PROMPT_RATIO", "0.5")
    found = report(capsys, model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, "--graph-reserved-mem", "0.2")
    pools = {name: pool["budget"] for name, pool in found["pools"].items()}
    assert abs(sum(pools.values()) - found["usable"] * 0.2) < 1 and abs(pools["decode"] * 2 - sum(pools.values())) < 2
    monkeypatch.setenv("VLLM_GRAPH_PROMPT_RATIO", "1.5")
    assert "VLLM_GRAPH_PROMPT_RATIO=1.5 must be in [0, 1]." in refused(capsys, [model, "--memory", "96GiB"])
    monkeypatch.setenv("VLLM_GRAPH_PROMPT_RATIO", "x")
    assert "VLLM_GRAPH_PROMPT_RATIO" in refused(capsys, [model, "--memory", "96GiB"])
    monkeypatch.delenv("VLLM_GRAPH_PROMPT_RATIO")
    monkeypatch.setenv("VLLM_GRAPH_DECODE_STRATEGY", "max")
    assert "VLLM_GRAPH_DECODE_STRATEGY" in refused(capsys, [model, "--memory", "96GiB"])


def test_memory_that_collectives_take_is_not_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Gaudi of several ranks leaves some to HCCL when it is opened, before a start reads how much it has."""
    total, words = 8 << 30, ("--memory", "8GiB", "--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager")

    def left_out(*more: str) -> int:
        found = report(capsys, *words, *more)
        assert sum(row["bytes"] for row in found["ledger"]) == found["total"]
        assert any("Collectives take" in note for note in found["notes"]) is (found["total"] < total)
        return total - int(found["total"])

    assert left_out("--device", "hpu") == 0
    assert left_out("--device", "hpu", "-tp", "2") == left_out("--device", "hpu", "-pp", "2") == 384 << 20
    assert left_out("--device", "cuda", "-tp", "2") == 0
    monkeypatch.setenv("PT_HCCL_MEMORY_ALLOWANCE_MB", "512")
    assert left_out("--device", "hpu", "-tp", "2") == 512 << 20
    monkeypatch.setenv("PT_HCCL_MEMORY_ALLOWANCE_MB", "some")
    assert "a whole number of MiB" in refused(capsys, [*words, "--device", "hpu", "-tp", "2"])


def test_buffers_of_sums_over_ranks_are_planned_unless_nccl_sums(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*more: object) -> tuple[int, list[str]]:
        found = report(capsys, model, "--device", "cuda", "--memory", "400GiB", *more)
        (others,) = (row["bytes"] for row in found["ledger"] if row["name"] == "used by others")
        return int(others), [note for note in found["notes"] if note.startswith("Sums over ranks take")]

    others, notes = planned("-tp", 4, "--others", "1GiB")
    assert others == (1 << 30) + cuda_sum_bytes(4) and notes == [
        "Sums over ranks take 7.0 MiB of each card's memory, which counts as used by others."
    ]
    assert planned() == (0, [])
    for name, value in (("TRENCADIS_CUDA_PEER_SUMS", "0"), ("TRENCADIS_CUDA_TWIN", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert planned("-tp", 4) == (0, [])


def test_measurements_replace_formulas(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, *GUIDE, "--graph-memory", "auto"]
    first = report(capsys, *words)
    assert "graphs" in first["by_formula"]
    dims = {stage: max(b["dims"] for b in found) for stage, found in first["buckets"].items() if stage != "sample"}
    graphs = {Bucket(Stage[s.upper()], tuple(d)): 3 << 20 for s, d in dims.items()}
    every = [
        Bucket(Stage[stage.upper()], tuple(b["dims"]), b["variant"])
        for stage, found in first["buckets"].items()
        for b in found
    ]
    held = dict.fromkeys(every, 5 << 30)
    key = graph_measurement_cache.MeasurementKey(
        graph_measurement_cache.fingerprint(load_config(model)), "hpu", "16 bit", 8, 128
    )
    graph_measurement_cache.store(
        key, graph_measurement_cache.Measurements(graphs, {b: 1.5 for b in graphs}, held), cache
    )
    second = report(capsys, *words)
    assert second["by_formula"] == []
    assert second["graphs"]["captured"] == second["graphs"]["planned"]
    assert next(r["bytes"] for r in second["ledger"] if "activations" in r["name"]) == 5 << 30
    assert sum(p["budget"] for p in second["pools"].values()) < first["usable"] * 0.1
    (cache / key.file).write_text("{")
    assert "graphs" in report(capsys, *words)["by_formula"]


def test_bucket_names_are_read_back() -> None:
    for bucket in (Bucket(Stage.FRESH, (2, 128)), Bucket(Stage.SAMPLE, (8,), "full"), Bucket(Stage.VISION, (64,))):
        assert graph_measurement_cache.bucket_of(str(bucket)) == bucket
    for text in ("fresh", "nothing[1]", "fresh[a]"):
        with pytest.raises(ValueError):
            graph_measurement_cache.bucket_of(text)


@pytest.mark.parametrize("option", [(), ("--rows-by-blocks",)])
def test_an_image_of_the_plan(
    model: Path, tmp_path: Path, option: tuple[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.png"
    run(capsys, model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, *GUIDE, "--plot", path, *option)
    with Image.open(path) as image:
        colours = {c for _, c in image.convert("RGB").getcolors(1 << 24) or []}
    assert image.size == (960, 640) and len(colours) > 20 and (225, 225, 225) in colours


def test_a_profile_of_a_trace_is_written_merged_and_planned_by(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, profile, merged = tmp_path / "trace.jsonl", tmp_path / "needs.json", tmp_path / "both.json"
    lines = [{"arrival": i / 9, "prompt": 40 * i + 1, "output": 9} for i in range(40)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    for device in ("hpu", "cuda"):
        words = [model, "--device", device, "--memory", "96GiB", "-tp", 8, *GUIDE]
        before = report(capsys, *words, "--trace", trace, "--save-profile", profile)
        run(capsys, *words, "--merge", f"{profile},{profile}", "--save-profile", merged)
        cells, both = (json.loads(p.read_text())["cells"] for p in (profile, merged))
        assert [c[:3] for c in both] == [c[:3] for c in cells]
        assert [c[3] for c in both] == pytest.approx([2 * c[3] for c in cells])
        after = report(capsys, *words, "--bucket-profile", merged)
        assert after["graphs"]["planned"] < before["graphs"]["planned"], device
        assert any("--bucket-profile: " in note for note in after["notes"])


def test_a_trace_is_compared(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival": i / 9, "prompt": 40 * i + 1, "output": 9, "images": [[640, 480]] * (i % 3)} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    words = [model, "--device", "hpu", "--memory", "96GiB", "-tp", 8, *GUIDE, "--trace", path]
    plans = report(capsys, *words)["trace"]["plans"]
    assert list(plans) == [
        "this plan", "learned, 40 graphs", "learned, 80 graphs", "linear", "powers of two", "reference exponential",
    ]  # fmt: skip
    assert plans["learned, 40 graphs"]["graphs"] < plans["this plan"]["graphs"]
    assert "powers of two" in run(capsys, *words)
    assert "--report needs --trace" in refused(capsys, [str(w) for w in (*words[:-2], "--report", tmp_path / "x.html")])
    bad = [str(w) for w in (*words, "--report", tmp_path / "none" / "x.html")]
    assert "--report" in refused(capsys, bad)
    for name in ("page.html", "needs.svg"):
        run(capsys, *words, "--report", tmp_path / name)
        text = (tmp_path / name).read_text()
        assert text.count("<svg") == 1 and "FRESH" in text and "learned, 40 graphs" in text and "script" not in text
        assert ("reference exponential" in text) == name.endswith("html")
    plot = tmp_path / "traffic.png"
    for option in ((), ("--rows-by-blocks",)):
        run(capsys, *words, "--plot", plot, *option)
        with Image.open(plot) as image:
            assert any(c == (30, 30, 60) for _, c in image.getcolors(1 << 24) or [])


def test_bad_words(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "needs the memory of one device, e.g. --memory 96GiB" in refused(capsys, [model])
    assert "--memory" in refused(capsys, [model, "--memory", "much"])
    assert "needs a value" in refused(capsys, [model, "--memory"])
    assert "no-such" in refused(capsys, [model, "--memory", "1GiB", "--no-such"])
    assert "none of cpu, cuda, hpu" in refused(capsys, [model, "--memory", "1GiB", "--device", "tpu"])
    assert "does not divide" in refused(capsys, [model, "--memory", "96GiB", "-tp", "7"])
    assert "--block-size" in refused(capsys, [model, "--memory", "96GiB", "--device", "hpu", "--block-size", "100"])
    assert "this device has none" in refused(capsys, [model, "--memory", "400GiB", "--plot", str(tmp_path / "x.png")])
    assert "usage: trencadis plan" in run(capsys, "--help")


def test_a_length_that_nobody_asked_for_is_lowered_to_the_longest_that_fits(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model, "--device", "hpu", "--memory", "24GiB", "-tp", 8, "--max-num-batched-tokens", "4096"]
    found = report(capsys, *words)
    length = found["limits"]["max_model_len"]
    assert length < 128000 and any(f"lowered from 128000 to {length}" in n for n in found["notes"])
    assert found["kv_blocks"] * 128 >= length
    report(capsys, *words, "--max-model-len", length)
    assert "needs" in refused(capsys, [*words, "--max-model-len", length + 128])


def test_measurements_of_something_else_are_not_taken(cache: Path) -> None:
    key = graph_measurement_cache.MeasurementKey("a", "hpu", "16 bit", 1, 128)
    path = graph_measurement_cache.store(
        key, graph_measurement_cache.Measurements({Bucket(Stage.DECODE, (1, 1)): 5}), cache
    )
    assert graph_measurement_cache.load(key, cache) == graph_measurement_cache.Measurements(
        {Bucket(Stage.DECODE, (1, 1)): 5}
    )
    for old, new in (('"ranks": 1', '"ranks": 2'), ('"version": 2', '"version": 1'), ("decode", "nothing")):
        path.write_text(path.read_text().replace(old, new))
        assert graph_measurement_cache.load(key, cache) is None
        graph_measurement_cache.store(
            key, graph_measurement_cache.Measurements({Bucket(Stage.DECODE, (1, 1)): 5}), cache
        )
    assert (
        graph_measurement_cache.load(graph_measurement_cache.MeasurementKey("b", "hpu", "16 bit", 1, 128), cache)
        is None
    )


def test_a_plan_finds_what_a_card_of_its_kind_measured(cache: Path) -> None:
    """A start stores under its card's name, which a plan does not know; a start itself reads its own card's only."""
    key = graph_measurement_cache.MeasurementKey("a", "cuda", "16 bit", 1, 16)
    assert graph_measurement_cache.load_nearest(key, cache) is None
    for age, name in enumerate(("cuda (old)", "cuda (new)", "hpu")):
        path = graph_measurement_cache.store(
            replace(key, device=name), graph_measurement_cache.Measurements({Bucket(Stage.DECODE, (1,)): age}), cache
        )
        os.utime(path, (age + 1, age + 1))
    assert graph_measurement_cache.load_nearest(key, cache) == graph_measurement_cache.Measurements(
        {Bucket(Stage.DECODE, (1,)): 1}
    )
    assert graph_measurement_cache.load(key, cache) is None
    for other in (replace(key, model="b"), replace(key, ranks=2), replace(key, dtype="32 bit")):
        assert graph_measurement_cache.load_nearest(other, cache) is None
    graph_measurement_cache.store(key, graph_measurement_cache.Measurements({Bucket(Stage.DECODE, (1,)): 9}), cache)
    assert graph_measurement_cache.load_nearest(key, cache) == graph_measurement_cache.Measurements(
        {Bucket(Stage.DECODE, (1,)): 9}
    )
