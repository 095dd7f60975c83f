"""How long a decoding step would take: recorded launches, cited constants, and the host beside the device."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.times import MODELS, PUBLISHED, SHORT, Published, estimate, text_of
from benchmarks.gpu.times_table import estimate_vllm, table_lines
from benchmarks.host.step import Load
from benchmarks.host.timeline import played, recorded
from tests.plan.test_states import LARGE
from trencadis.backends.cuda.time_estimates import kernel_times, time_report
from trencadis.backends.cuda.time_estimates.kernel_times import (
    COLLECTIVE,
    PRODUCT,
    HostStep,
    RecordedKernel,
    compute_kernel_seconds,
    simulate_timeline,
    step_time,
    time_of,
)
from trencadis.backends.cuda.time_estimates.meta_launch_recorder import CODED_EXPERTS, EXPERTS, DecodeRecorder
from trencadis.backends.cuda.weights.decoded_pieces import choose_programs
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.quant_config import Quantisation, QuantRule, online
from trencadis.core.devices import timer
from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
from trencadis.core.shapes.launch_costs import layers_values
from trencadis.server.plan.plan_command import main as plan


def steps(before: float, after: float, device: float, count: int = 50) -> list[tuple[HostStep, float]]:
    return [(HostStep(before, after), device)] * count


def test_a_device_waits_only_for_a_host_that_is_slower() -> None:
    fast = simulate_timeline(steps(1, 1, 5))
    assert fast.idle == 0 and fast.step == 5 and fast.longest == 0
    slow = simulate_timeline(steps(4, 3, 5))
    assert slow.step == pytest.approx(7, rel=0.03) and slow.longest == pytest.approx(2)
    assert slow.idle == pytest.approx(2 / 7, rel=0.05)


def test_without_depth_every_step_waits_for_its_result() -> None:
    """Host 2 before and 1 after, device 5: 8 a step, 3 of them idle; one step beyond hides all of it."""
    assert simulate_timeline(steps(2, 1, 5), depth=0).step == pytest.approx(8, rel=0.03)
    assert simulate_timeline(steps(2, 1, 5), depth=1).step == 5


def test_one_slow_step_is_hidden_as_far_as_the_depth_reaches() -> None:
    played_steps = steps(1, 1, 5)
    played_steps[20] = (HostStep(8, 1), 5)
    line = simulate_timeline(played_steps)
    assert line.longest == pytest.approx(4) and line.total == pytest.approx(50 * 5 + 4)


def test_every_constant_cites_where_it_is_from() -> None:
    for name in kernel_times.cards():
        found = kernel_times.sources(name)
        assert {*kernel_times.SCALED} <= found.keys()
        for key, source in found.items():
            said = re.search(r"\d{4}|data sheet|white paper|github\.com|the same two points|device query", source)
            assert len(source) > 20 and said, (name, key, source)
        checked = kernel_times.list_confirmations(name)
        assert all(len(place) > 8 for place in checked.values())
        unread = ["l2_bandwidth", "graph"] if name == "B200" else ["graph"]
        assert [key for key, place in checked.items() if place == "not found"] == unread
        assert "(not found again)" in found["graph"]
        shares = kernel_times.card(name)
        assert all(0 < getattr(shares, key) <= 1 for key in kernel_times.SCALED if key.endswith("share"))
    assert all(len(source) > 20 for _, source in kernel_times.load_constants()["host"].values())
    with pytest.raises(StartupError, match="--card V100: there are figures of A100"):
        kernel_times.card("V100")


def test_a_kernel_takes_the_longer_of_reading_and_computing() -> None:
    on = kernel_times.card("H100")
    reads = compute_kernel_seconds(RecordedKernel("mm", PRODUCT, 1 << 30, 1), on)
    assert reads == pytest.approx((1 << 30) / (3.35e12 * 0.78))
    assert compute_kernel_seconds(RecordedKernel("mm", PRODUCT, 1, 10**15), on) == pytest.approx(
        10**15 / (9.89e14 * 0.75)
    )
    assert compute_kernel_seconds(RecordedKernel("all_reduce", COLLECTIVE, 1 << 19), on) == pytest.approx(
        21e-6, rel=0.01
    )
    assert compute_kernel_seconds(RecordedKernel("all_reduce", COLLECTIVE, 4 << 20), on) == pytest.approx(
        39e-6, rel=0.01
    )
    assert time_of([RecordedKernel("mm", PRODUCT, 0)] * 10, on).total == pytest.approx(10 * (on.gap + on.least))


def llama() -> ModelConfig:
    """The sizes of Llama 3 8B."""
    made = text_of(4096, 32, 32, 8, 14_336, 128_256, False)
    return replace(made, text=replace(made.text, qkv_bias=False, mrope_section=None))


LAYER = {
    4: {"skinny_kernel": 4, "turned_items_kernel": 1, "join_kernel": 1},
    32: {"_rms_norm": 2, "rope_kernel": 1, "items_kernel": 1, "join_kernel": 1, "_silu_mul": 1},
}
"""Rows of a step -> the kernels of a layer; beside them products of torch."""


@pytest.mark.parametrize("rows", LAYER)
@pytest.mark.parametrize("name", ["3B", "7B", "72B", "Llama 8B"])
def test_a_tape_holds_what_serving_launches(name: str, rows: int) -> None:
    """Kernels of a layer by name, and the bytes of weights and keys, for the sizes of real models: up to 16 rows a
    layer has six kernels, and ranks' sums beside them."""
    make, ranks = MODELS.get(name, (llama, 1))
    model = make()
    text, context = model.text, 1000
    found = DecodeRecorder(model, ranks).step(rows, context)
    counts = Counter(k.name for k in found)
    layer = {**dict.fromkeys([*LAYER[4], *LAYER[32]], 0), **LAYER[rows]}
    assert {n: counts[n] / text.layers for n in layer if n != "_rms_norm"} == {
        n: count for n, count in layer.items() if n != "_rms_norm"
    }
    assert counts["_rms_norm"] == layer["_rms_norm"] * text.layers + 1, "one before the head"
    products = sum(k.kind == PRODUCT for k in found)
    assert products == 4 * text.layers + 1
    read = sum(k.bytes for k in found if k.kind == PRODUCT) * ranks
    assert read == pytest.approx(2 * (layers_values(text) + text.hidden * text.vocab), rel=0.04)
    keys = sum(k.bytes for k in found if k.name.endswith("items_kernel")) * ranks
    stored = 2 * text.layers * rows * (context + 1) * text.kv_heads * text.head_dim * 2
    assert keys == pytest.approx(stored, rel=0.05)
    sums = 0 if ranks == 1 else 2 * text.layers + 1
    assert counts["all_reduce"] == sums, "and the head gathers"
    if rows == 4:
        assert len(found) - sums <= 6 * text.layers + 8, counts
    print(f"\n{name}, {rows} rows: {len(found)} kernels a step")


@pytest.mark.parametrize(("rows", "width", "fused"), [(1, 5, True), (4, 4, True), (4, 5, False)])
def test_a_step_that_verifies_is_six_kernels_a_layer_up_to_sixteen_tokens(rows: int, width: int, fused: bool) -> None:
    model = MODELS["3B"][0]()
    text, context = model.text, 1000
    recorder = DecodeRecorder(model)
    found = recorder.step(rows, context, width=width)
    counts = Counter(k.name for k in found)
    layer = {"skinny_kernel": 4, "verify_items_kernel": 1, "join_kernel": 1} if fused else LAYER[32]
    got = {name: counts[name] / text.layers for name in layer if name != "_rms_norm"}
    assert got == {name: count for name, count in layer.items() if name != "_rms_norm"}
    if fused:
        assert len(found) == len(recorder.step(rows, context)), "as many kernels as a step without drafts"
    keys = sum(k.bytes for k in found if k.name.endswith("items_kernel"))
    stored = 2 * text.layers * rows * (context + width) * text.kv_heads * text.head_dim * 2
    assert keys == pytest.approx(stored, rel=0.1), "each stored key once for all tokens of a row"


@pytest.mark.parametrize("rows", [1, 32])
def test_a_step_reads_and_writes_the_states_of_its_rows(rows: int, tmp_path: Path) -> None:
    """Qwen3.6-27B's layers, twelve of them; up to 16 rows the recurrent ones are seven kernels, the others
    six."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 12}))
    model = load_config(tmp_path)
    assert model.text.recurrent is not None
    found = DecodeRecorder(model).step(rows, 1000)
    moved = sum(k.bytes for k in found if k.name in ("net_kernel", "conv_step_kernel"))
    counts = Counter(k.name for k in found)
    assert counts["net_kernel"] == counts["conv_step_kernel"] == 9
    assert counts["skinny_kernel"] == (57 if rows == 1 else 0)
    assert len(found) < (9 * 7 + 3 * 6 + 20 if rows == 1 else 9 * 11 + 70)
    print(f"{rows} rows: {len(found)} kernels a step")
    states = 2 * rows * 9 * model.text.recurrent.slot_bytes(2)
    assert states < moved < 1.1 * states
    prompt = DecodeRecorder(model).prompt(300)
    assert {"squares_kernel", "scan_kernel", "conv_kernel"} <= {k.name for launch in prompt for k in launch}
    said = "\n".join(time_report.lines(time_report.times(model, 1, "H100", [rows])))
    assert "limit: reading weights" in said and "TTFT" in said, said


def test_plan_prints_steps_that_verify(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cuda", "--memory", "80GiB", "--time", "--spec-method", "ngram", "--max-num-seqs", "32"]
    assert plan(words) == 0
    said = capsys.readouterr().out
    assert "  1 rows of 4 drafts: " in said and " kernels; pays from 1.0" in said, said


def test_parts_add_up_and_constants_move_a_step_the_right_way() -> None:
    tape = DecodeRecorder(MODELS["3B"][0]()).step(2, 500)
    on = kernel_times.card("H100")
    device, line = step_time(tape, 2, on)
    shares = time_report.parts(device, line)
    assert sum(shares.values()) == pytest.approx(line.step, rel=1e-3)
    moved = time_report.sensitivity(tape, 2, on, 1)
    assert moved["bandwidth"][0] > 0.5 and moved["bandwidth"][1] < 0 < moved["gap"][1]
    slow = replace(on, host=tuple((n, 100 * s) for n, s in on.host))
    device, line = step_time(tape, 2, slow)
    assert line.idle > 0.5 and max(time_report.parts(device, line).items(), key=lambda one: one[1])[0] == "host"


def test_what_limits_each_model_is_said() -> None:
    """3B at one row, 7B at 32, 72B on four cards: each a line with its limit, and its constants at +-50 %."""
    said = {}
    for name, rows in (("3B", 1), ("7B", 32), ("72B", 32)):
        make, ranks = MODELS[name]
        found = time_report.times(make(), ranks, "H100", [rows])
        text = "\n".join(time_report.lines(found))
        assert "limit: " in text and "a constant 50 % less / more: " in text and "nothing measured here" in text
        load = found["loads"][0]
        said[name] = load["limit"], load["parts"]
        print(f"\n{name}, {rows} rows:\n{text[: text.index('  sources:')]}")
    assert said["3B"][0] == said["7B"][0] == "reading weights"
    assert said["72B"][1]["collectives"] > 0.1 * sum(said["72B"][1].values()), "NCCL's sums are a part that counts"


def test_plan_prints_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cuda", "--memory", "80GiB", "--time", "--card", "H200"]
    assert plan(words) == 0
    reported = capsys.readouterr().out
    assert (
        "decoding on H200" in reported
        and reported.count(" rows: TPOT ") == 3
        and "limit: " in reported
        and "sources:" in reported
    )


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_plan_prints_the_times_of_quantised_weights(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Codes have no values there."""
    assert plan(["--device", "cuda", "--memory", "80GiB", "--time", "--quantization", kind]) == 0
    said = capsys.readouterr().out
    assert said.count(" rows: TPOT ") == 3 and "prompt of 2,048 tokens: TTFT" in said


def test_products_of_eight_bits_run_at_twice_the_rate() -> None:
    on = kernel_times.card("H100")
    model = replace(MODELS["7B"][0](), quant=online("fp8"))
    (launch,) = DecodeRecorder(model).prompt(2048)
    rounded = [k for k in launch if k.name == "_scaled_mm"]
    assert len(rounded) == 4 * model.text.layers and {k.rate for k in rounded} == {2.0}
    assert sum(k.flops for k in rounded) == 2 * 2048 * layers_values(model.text)
    slow, fast = (compute_kernel_seconds(replace(rounded[0], rate=rate), on) for rate in (1.0, 2.0))
    assert slow == pytest.approx(2 * fast)
    each = [k.name for k in launch if k.name in ("rounded_rows_kernel", "_rms_norm", "_silu_mul", "div")]
    assert each == ["rounded_rows_kernel"] * 4 * model.text.layers + ["_rms_norm", "rounded_rows_kernel"], (
        "but the head's"
    )


@pytest.mark.parametrize(("rows", "experts"), [(1, 7.8), (16, 81), (256, 128)])
def test_a_step_reads_the_experts_that_its_tokens_have(rows: int, experts: float) -> None:
    """Eight of 128 for a token, and for more rows those that random choices would leave out of none."""
    model = MODELS["30B-A3B"][0]()
    found = [k for k in DecodeRecorder(model).step(rows, 100) if k.name in EXPERTS]
    assert len(found) == 2 * model.text.layers
    each = 3 * 2048 * 768
    assert sum(k.bytes for k in found) / model.text.layers == pytest.approx(2 * each * experts, rel=0.03)
    assert sum(k.flops for k in found) == 2 * 8 * rows * each * model.text.layers


@pytest.mark.parametrize(("kind", "bits"), [("int4", 4.5), ("int8", 8.0)])
def test_a_step_reads_the_codes_of_the_experts_that_its_tokens_have(kind: str, bits: float) -> None:
    """With scales of groups; a prompt decodes each expert once for every tile of its pairs."""
    plain = MODELS["30B-A3B"][0]()
    recorder = DecodeRecorder(replace(plain, quant=online(kind)))
    found = [k for k in recorder.step(1, 100) if k.name in CODED_EXPERTS]
    layers, each = plain.text.layers, 3 * 2048 * 768
    assert len(found) == 2 * layers
    assert sum(k.bytes for k in found) / layers == pytest.approx(bits / 8 * each * 7.8, rel=0.03)
    assert sum(k.flops for k in found) == 2 * 8 * each * layers
    assert sum(k.codes for k in found) / layers == pytest.approx(each * 7.8, rel=0.01)
    (launch,) = recorder.prompt(2048)
    many = [k for k in launch if k.name in CODED_EXPERTS]
    assert sum(k.codes for k in many) / layers == pytest.approx(each * (2048 * 8 / 128 + 64), rel=0.01)
    assert {k.rate for k in many} == {2.0 if kind == "int8" else 1.0}
    assert {k.instructions for k in many} == {9.9 if kind == "int4" else 2.1}, "integers by integers are not decoded"


def test_a_library_takes_the_tile_that_leaves_no_processor_idle() -> None:
    assert choose_programs(8192, 8192, 132) == (64 * 32, 128 * 256), "large products: the largest tile"
    assert choose_programs(128, 4096, 132) == (64, 64 * 128), "of 16, 32 and 64 programs the most"


BLOCKS = Scheme(8, "float", group=128, block=128, activations="token")
CODED = {
    "int4": (Scheme(4, group=128, symmetric=False), 1.15), "fp8 in blocks": (BLOCKS, 0.66),
    "fp8 in blocks, activations in 16 bits": (replace(BLOCKS, activations="none"), 1.15),
}  # fmt: skip
"""Weights -> their scheme, and the share of 16 bits' time that a prompt of 2,048 tokens takes at most."""


@pytest.mark.parametrize("name", ["3B", pytest.param("7B", marks=pytest.mark.long)])
def test_quantised_weights_beside_sixteen_bits(name: str) -> None:
    """A step of one row over 4 bits, the head in 16, takes at most 0.453 of it."""
    model, on = MODELS[name][0](), kernel_times.card("H100")

    def estimate(quant: Quantisation | None) -> tuple[float, float]:
        recorder = DecodeRecorder(replace(model, quant=quant))
        step = step_time(recorder.step(1, 1024), 1, on)[1].step
        return step, sum(time_of(kernels, on).total for kernels in recorder.prompt(2048))

    step, prompt = estimate(None)
    for label, (scheme, most) in CODED.items():
        rules = (QuantRule(("Linear",), scheme),)
        found = estimate(Quantisation("compressed-tensors", label, rules, ignore=("lm_head", "embed_tokens")))
        assert found[1] <= most * prompt, label
        assert label != "int4" or found[0] <= 0.453 * step


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_the_table_has_vllm_beside_each_figure(kind: str) -> None:
    made, ranks = MODELS["3B"]
    head, _, line = table_lines({"3B": (made(), ranks)}, "H100", 1024, (kind,))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["3B", kind] and len(cells) == head.count("|") - 1 == 10
    assert all(re.fullmatch(r"[\d.,]+ / [\d.,]+", cell) for cell in cells[2:]), cells


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_prompts_of_coded_experts_take_hardly_longer_than_those_of_16_bits(kind: str) -> None:
    model, on = MODELS["30B-A3B"][0](), kernel_times.card("H100")
    plain, coded = (
        sum(time_of(kernels, on).total for kernels in DecodeRecorder(one).prompt(8192))
        for one in (model, replace(model, quant=online(kind)))
    )
    assert coded <= 1.1 * plain


def test_vllm_loads_experts_as_codes() -> None:
    """Weights that its tiles load have fewer bytes, in fp8 rows too."""
    model, on = MODELS["30B-A3B"][0](), kernel_times.card("H100")
    plain, int4, fp8 = (estimate_vllm(model, kind, 1, on, 1024, (16,), (8192,)) for kind in ("", "int4", "fp8"))
    assert int4.steps[16] < 0.5 * plain.steps[16] and fp8.prompts[8192] < int4.prompts[8192] < plain.prompts[8192]


def test_other_devices_have_no_figures() -> None:
    with pytest.raises(StartupError, match="not for cpu"):
        timer("cpu")


@pytest.mark.parametrize("rows", [16, pytest.param(256, marks=pytest.mark.long)])
def test_no_device_waits_for_the_recorded_host(rows: int) -> None:
    """3B steps of 6 ms, the host's steps as they were recorded here; five times as slow a host is hidden as well."""
    found = recorded(Load(rows, 64 if rows == 16 else 1024), 60)
    line = played(found, 6e-3)
    print(
        f"\n{rows} rows: step {1e3 * line.step:.3f} ms, longest wait {1e3 * line.longest:.3f} ms, idle {line.idle:.2%}"
    )
    assert line.idle < 0.01
    assert played([HostStep(0.1, 0.1)] * 60, 6e-3).idle > 0.9


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda f: f"{f.engine} {f.model} {f.prompt or f.rows}")
def test_published_figures_are_within_fifteen_percent(figure: Published) -> None:
    assert abs(estimate(figure) / figure.seconds - 1) <= 0.15, (estimate(figure), figure)


@pytest.mark.parametrize("figure", SHORT, ids=lambda f: f.model)
def test_short_prompts_are_estimated_too_low(figure: Published) -> None:
    """The engine's own host is not part of the estimate."""
    assert 0.6 < estimate(figure) / figure.seconds < 1


def test_a_kernel_takes_some_time_at_the_least() -> None:
    on = kernel_times.card("H100")
    assert compute_kernel_seconds(RecordedKernel("k", PRODUCT, 1), on) == on.least
    codes = RecordedKernel("k", PRODUCT, 1, codes=10**10, instructions=4)
    assert compute_kernel_seconds(codes, on) == pytest.approx(4e10 / (132 * 128 * on.clock))


def test_a_last_wave_counts_whole() -> None:
    on = kernel_times.card("H100")
    flops = int(on.flops * 1e-3)
    one, more = (compute_kernel_seconds(RecordedKernel("k", PRODUCT, 1, flops, programs=n), on) for n in (132, 133))
    assert more / one == pytest.approx(2 * 132 / 133)


def test_prompts_are_reported_beside_steps() -> None:
    found = time_report.times(MODELS["3B"][0](), 1, "H100", (1,), prompts=(2048, 16_384))
    two, sixteen = found["prompts"]
    assert (two["launches"], sixteen["launches"]) == (1, 2) and sixteen["ttft"] > 8 * two["ttft"]
    assert 0.02 < two["ttft"] < 0.06
    said = "\n".join(time_report.lines(found))
    assert "prompt of 2,048 tokens: TTFT" in said and "prompt of 16,384 tokens: TTFT" in said


def test_prompts_are_priced_by_what_attends_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``serve`` chooses: flash-attn 3 on a Hopper where it is asked for, or installed and nothing is asked for."""
    model = MODELS["3B"][0]()

    def priced(attention: str, name: str = "H100") -> tuple[float, str]:
        found = time_report.times(model, 1, name, (1,), prompts=(16_384,), attention=attention)
        said = next(line for line in time_report.lines(found) if "attention of prompts" in line)
        return found["prompts"][0]["ttft"], said

    own, said = priced("")
    assert "this engine's own kernels" in said
    fast, said = priced("FLASH_ATTN")
    assert "flash-attn 3 (asked for)" in said and fast < 0.9 * own
    assert priced("FLASHINFER")[0] == priced("TRITON_ATTN")[0] == own
    assert "for want of figures of FLASH_ATTN on A100" in priced("FLASH_ATTN", "A100")[1]
    monkeypatch.setattr(time_report, "_has_flash_3", lambda: True)
    assert priced("")[0] == fast and "installed here" in priced("")[1]
    assert priced("TRITON_ATTN")[0] == own and priced("", "A100")[1].endswith("own kernels")
