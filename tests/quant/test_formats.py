"""Each format decodes to the values that its publishers define: vectors written out by hand, and a grid of schemes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quant.checkpoints import made, tensors
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.quant_config import read_quantisation
from trencadis.core.checkpoint.quantised_tensor_readers import READERS, RawWeight
from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import QTensor, fits, join_weights
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme


def read(kind: str, stored: dict[str, Tensor], shape: tuple[int, int], scheme: Scheme) -> QTensor:
    """The weight ``w`` of ``stored``."""
    raw = RawWeight("a checkpoint", "w", shape, scheme, lambda suffix: stored.get(f"w.{suffix}"), torch.float32)
    return READERS[kind](raw)


def words(*values: int) -> Tensor:
    """int32 of unsigned words."""
    return torch.tensor([v - (1 << 32) if v >> 31 else v for v in values], dtype=torch.int64).int()


def test_awq_words_hold_even_outputs_before_odd_ones() -> None:
    """0x76543210: nibble i holds output 0, 2, 4, 6, 1, 3, 5, 7; so the outputs are 0, 4, 1, 5, 2, 6, 3, 7."""
    stored = {
        "w.qweight": words(0x76543210, 0xFFFFFFFF).view(2, 1), "w.qzeros": words(0x11111111).view(1, 1),
        "w.scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }  # fmt: skip
    q = read("awq", stored, (8, 2), Scheme(4, group=2, symmetric=False))
    assert q.dequantised()[:, 0].tolist() == [-0.5, 1.5, 0.0, 2.0, 0.5, 2.5, 1.0, 3.0]
    assert q.dequantised()[:, 1].tolist() == [7.0] * 8


@pytest.mark.parametrize(("kind", "zeros"), [("gptq", 0x77777777), ("gptq_v2", 0x88888888)])
def test_gptq_words_hold_neighbouring_inputs_and_v1_zero_points_less_one(kind: str, zeros: int) -> None:
    """0xFEDCBA98 holds 8 to 15 from the lowest bits up; the zero point is 8 in both versions."""
    stored = {
        "w.qweight": torch.stack([words(0x76543210, 0xFEDCBA98)] * 8, 1)[:, :8],
        "w.qzeros": words(zeros, zeros).view(2, 1), "w.scales": torch.tensor([[1.0] * 8, [0.25] * 8]).half(),
    }  # fmt: skip
    q = read(kind, stored, (8, 16), Scheme(4, group=8))
    assert q.dequantised()[3].tolist() == [-8.0, -7, -6, -5, -4, -3, -2, -1, 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_gptq_of_8_bits_and_a_zero_point_of_zero() -> None:
    """Stored zero points of 255 stand for 0 in the first version, since they are less one."""
    stored = {
        "w.qweight": torch.stack([words(0x04030201)] * 4, 1), "w.qzeros": words(0xFFFFFFFF).view(1, 1),
        "w.scales": torch.full((1, 4), 2.0).half(), "w.g_idx": torch.zeros(4, dtype=torch.int32),
    }  # fmt: skip
    q = read("gptq", stored, (4, 4), Scheme(8, group=4, symmetric=False))
    assert q.dequantised()[0].tolist() == [2.0, 4.0, 6.0, 8.0]


def test_gptq_columns_take_the_group_that_g_idx_names() -> None:
    stored = {
        "w.qweight": torch.stack([words(0x99999999, 0x99999999)] * 8, 1),
        "w.qzeros": words(0x77777777, 0x77777777).view(2, 1),
        "w.scales": torch.tensor([[1.0] * 8, [10.0] * 8]).half(),
        "w.g_idx": torch.tensor([1, 0] * 8, dtype=torch.int32),
    }  # fmt: skip
    q = read("gptq", stored, (8, 16), Scheme(4, group=8, ordered=True))
    assert q.dequantised()[0].tolist() == [10.0, 1.0] * 8
    assert q.inputs(3, 6).dequantised()[0].tolist() == [1.0, 10.0, 1.0]


def test_packed_codes_have_8_added_and_zero_points_lie_along_the_output() -> None:
    """compressed-tensors: codes of -8 to 7 plus 8 along a row, zero points plus 8 down a column."""
    stored = {
        "w.weight_packed": words(0x76543210, 0xFEDCBA98).view(2, 1), "w.weight_shape": torch.tensor([2, 6]),
        "w.weight_scale": torch.tensor([[1.0, 2.0], [4.0, 8.0]]).bfloat16(),
        "w.weight_zero_point": words(0x98, 0x79).view(1, 2),
    }  # fmt: skip
    q = read("compressed-tensors", stored, (2, 6), Scheme(4, group=3, symmetric=False))
    assert q.dequantised().tolist() == [[-8.0, -7, -6, -12, -10, -8], [-4.0, 0, 4, 32, 40, 48]]


def test_packed_codes_of_8_bits_have_128_added() -> None:
    stored = {"w.weight_packed": words(0xFF817F00).view(1, 1), "w.weight_scale": torch.tensor([[0.5]])}
    q = read("compressed-tensors", stored, (1, 4), Scheme(8))
    assert q.dequantised().tolist() == [[-64.0, -0.5, 0.5, 63.5]]


def test_a_group_index_that_was_never_set_counts_as_none() -> None:
    stored = {
        "w.weight_packed": words(0x99999999).view(1, 1), "w.weight_scale": torch.tensor([[1.0, 3.0]]),
        "w.weight_g_idx": torch.full((8,), -1, dtype=torch.int32),
    }  # fmt: skip
    q = read("compressed-tensors", stored, (1, 8), Scheme(4, group=4, ordered=True))
    assert q.dequantised().tolist() == [[1.0] * 4 + [3.0] * 4]


@pytest.mark.parametrize(
    ("scale", "scheme"),
    [
        (torch.tensor([0.5]), Scheme(8, "float", block=0)), (torch.tensor(0.5), Scheme(8, "float", block=0)),
        (torch.tensor([[0.5], [0.5], [0.5]]), Scheme(8, "float")), (torch.tensor([0.5, 0.5, 0.5]), Scheme(8, "float")),
        (torch.tensor([[0.5, 0.5], [0.5, 0.5]]), Scheme(8, "float", group=4, block=2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "suffix"), [("compressed-tensors", "weight_scale"), ("fp8", "weight_scale_inv")])
def test_floats_of_8_bits_with_every_layout_of_scales(scale: Tensor, scheme: Scheme, kind: str, suffix: str) -> None:
    codes = torch.tensor([[0x38, 0xB8, 0x40, 0x7E, 0x01, 0x00]] * 3, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q = read(kind, {"w.weight": codes, f"w.{suffix}": scale}, (3, 6), scheme)
    assert q.dequantised().tolist() == [[0.5, -0.5, 1.0, 224.0, 2.0**-10, 0.0]] * 3


GRID: list[tuple[str, int, int, bool, bool]] = [
    (kind, bits, group, symmetric, ordered)
    for kind in ("pack-quantized", "int-quantized", "awq", "gptq", "gptq_v2")
    for bits in (4, 8)
    for group in (32, 64, 128, 0)
    for symmetric in (True, False)
    for ordered in (False, True)
    if not (kind == "int-quantized" and (bits == 4 or group))
    and not (kind == "awq" and (bits == 8 or symmetric or ordered))
    and not (ordered and not group)
]


def seen(m: Any) -> str:
    return "compressed-tensors" if m in ("pack-quantized", "int-quantized") else str(m)


@pytest.mark.parametrize(("kind", "bits", "group", "symmetric", "ordered"), GRID)
def test_every_scheme_decodes_cuts_and_joins(kind: str, bits: int, group: int, symmetric: bool, ordered: bool) -> None:
    """Whole, in shares of 1, 2 and 4 ranks by rows and by columns (some within a group), joined, and padded."""
    generator = torch.Generator().manual_seed(bits + group)
    parts = [made(torch.randn(n, 384, generator=generator), bits, group, symmetric, ordered, 7) for n in (16, 24)]
    scheme = Scheme(bits, group=group, symmetric=symmetric, ordered=ordered)
    found = []
    for m in parts:
        q = read(seen(kind), tensors(kind, "w", m), (len(m.codes), 384), scheme)
        assert torch.equal(q.dequantised(), m.values())
        found.append(q)
        for world in (2, 4):
            each, rows = 384 // world, len(m.codes) // world
            for rank in range(world):
                cut = q.inputs(rank * each, (rank + 1) * each)
                assert torch.equal(cut.dequantised(), m.values()[:, rank * each : (rank + 1) * each])
                own = q.rows(rank * rows, (rank + 1) * rows)
                assert torch.equal(own.dequantised(), m.values()[rank * rows : (rank + 1) * rows])
        odd = q.inputs(90, 231).padded(30, 150).dequantised()
        assert torch.equal(odd[: len(m.codes), :141], m.values()[:, 90:231])
        assert not odd[len(m.codes) :].any() and not odd[:, 141:].any()
    assert fits(*found)
    assert torch.equal(join_weights(found).dequantised(), torch.cat([m.values() for m in parts]))


def test_parts_of_other_orders_do_not_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    for seed in (1, 2):
        m = made(torch.randn(16, 64, generator=generator), 4, 32, True, True, seed)
        found.append(read("gptq", tensors("gptq", "w", m), (16, 64), Scheme(4, group=32, ordered=True)))
    assert not fits(*found)


def config(**values: Any) -> JsonFields:
    return JsonFields({"quantization_config": values}, "config.json")


CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("targets", "ignore", "quantised"),
    [
        (["Linear"], ["lm_head"], {"layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "visual.blocks.0.attn.qkv"}),
        (["Linear"], ["lm_head", "re:.*visual.*", "model.layers.0.mlp.up_proj"], {"layers.1.self_attn.q_proj"}),
        (["re:.*self_attn.*"], [], {"layers.1.self_attn.q_proj"}),
        (["model.language_model.layers.0.mlp.up_proj"], [], {"layers.0.mlp.up_proj"}),
        (["Embedding"], [], set()),
    ],
)
def test_targets_and_ignored_modules(targets: list[str], ignore: list[str], quantised: set[str]) -> None:
    group = {"targets": targets, "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}
    q = read_quantisation(config(**CT, config_groups={"group_0": group}, ignore=ignore))
    modules = ("layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "visual.blocks.0.attn.qkv", "lm_head")
    assert {m for m in modules if q.scheme(m) is not None} == quantised


def test_gptq_overrides_by_module() -> None:
    dynamic = {r"-:model\.layers\.1\..*": {}, r".*\.up_proj": {"bits": 8, "group_size": 32, "desc_act": True}}
    q = read_quantisation(config(quant_method="gptq", bits=4, group_size=128, sym=True, dynamic=dynamic))
    assert q.scheme("layers.0.mlp.up_proj") == Scheme(8, group=32, ordered=True)
    assert q.scheme("layers.0.mlp.down_proj") == Scheme(4, group=128)
    assert q.scheme("layers.1.mlp.up_proj") is None and q.scheme("lm_head") is None


def test_names_of_modules_not_to_convert_are_parts_of_names() -> None:
    q = read_quantisation(config(quant_method="awq", bits=4, group_size=128, modules_to_not_convert=["visual"]))
    assert q.scheme("visual.blocks.0.attn.qkv") is None and q.scheme("layers.0.mlp.up_proj") is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "holds bitsandbytes weights"),
    ({"quant_method": "gguf"}, "holds gguf weights"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "holds modelopt weights"),
    ({"quant_method": "aqlm"}, "holds aqlm weights"), ({"bits": 4}, "no quant_method"),
    ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
    ({"quant_method": "gptq", "bits": 2}, "GPTQ weights of 2 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in marlin layout"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "is no pattern"),
    ({"quant_method": "gptq", "bits": 4, "sym": "yes"}, "sym is"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "in gemv order"),
    ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits"),
    ({"quant_method": "awq", "zero_point": False}, "zero_point is false"),
    ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ({**CT, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    ({**CT, "format": "mxfp4-pack-quantized"}, "mxfp4-pack-quantized"), ({**CT, "format": "marlin-24"}, "marlin-24"),
    ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"), (CT, "config_groups"),
    ({**CT, "config_groups": {"a": {"targets": "Linear"}}}, "targets is"),
    ({**CT, "config_groups": {"a": {"targets": ["re:("], "weights": {}}}}, "is no pattern"),
    ({**CT, "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}, "weights of 3 bits"),
    ({**CT, "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}}, "(float)"),
    ({**CT, "config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "group"}}}}, "needs one"),
    ({**CT, "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8},
      "input_activations": {"num_bits": 4}}}}, "activations of 4 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "part"), REFUSED)
def test_what_is_not_implemented_is_refused_in_one_line(values: dict[str, Any], part: str) -> None:
    with pytest.raises(StartupError) as refused:
        read_quantisation(config(**values))
    assert part in str(refused.value) and "\n" not in str(refused.value)
