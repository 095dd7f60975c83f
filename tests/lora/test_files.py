"""PEFT's files: what is read, what is refused in one line, and the checkpoint that ``merge-lora`` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes import checkpoints
from tests.fakes.adapters import LANGUAGE, QWEN_TOWER, adapter_of, load_base, matrices, train_with_peft, write_adapter
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.lora.adapter_files import read_adapter, resolve_folder
from trencadis.core.lora.adapter_store import load_matrices
from trencadis.core.quant.writing.merge_adapter import merge_adapter
from trencadis.server.cli import main
from trencadis.server.config.model_download import find_adapter_folder
from trencadis.server.prompts.adapter_registry import AdapterRegistry, NamedAdapter, parse_modules


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_5_vl(tmp_path_factory.mktemp("qwen"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_a_module_has_its_own_rank_and_scale(base: Path, tmp_path: Path) -> None:
    ranks = {module: 4 for module, _ in matrices(base, r".*layers\.1\.self_attn\.q_proj")}
    folder = adapter_of(
        base, tmp_path / "a", ranks=ranks, rank_pattern={r"layers\.1\.self_attn\.q_proj": 4},
        alpha_pattern={"down_proj": 64, r"^model\.layers\.0\.mlp\.up_proj": 2.5},
    )  # fmt: skip
    modules = read_adapter(folder, load_config(base)).modules
    assert modules["layers.1.self_attn.q_proj"].rank == 4 and modules["layers.1.self_attn.q_proj"].scale == 4
    assert modules["layers.0.self_attn.q_proj"].rank == 8 and modules["layers.0.self_attn.q_proj"].scale == 2
    assert modules["layers.0.mlp.down_proj"].scale == 8 and modules["layers.0.mlp.up_proj"].scale == 2.5 / 8
    assert modules["layers.1.mlp.up_proj"].scale == 2
    rooted = adapter_of(base, tmp_path / "b", use_rslora=True)
    assert {m.scale for m in read_adapter(rooted, load_config(base)).modules.values()} == {16 / 8**0.5}


def test_the_digest_is_that_of_the_contents(base: Path, tmp_path: Path) -> None:
    config = load_config(base)
    first, again, other = (adapter_of(base, tmp_path / n, seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    scaled = adapter_of(base, tmp_path / "d", seed=1, alpha=32)
    digests = [read_adapter(folder, config).digest for folder in (first, again, other, scaled)]
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_both_layouts_of_names_are_read(multimodal: Path, tmp_path: Path, prefix: str) -> None:
    shapes = {re.sub(r"^model\.(language_model\.)?", prefix, name): s for name, s in matrices(multimodal)}
    adapter = read_adapter(write_adapter(tmp_path / "a", shapes), load_config(multimodal))
    assert len(adapter.modules) == 14 and not adapter.in_tower


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is"),
    ({"use_dora": True}, "use_dora is true; DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is .* whole modules"),
    ({"bias": "all"}, "bias is"),
    ({"lora_bias": True}, "biases"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
    ({"trainable_token_indices": [1]}, "embeddings"),
    ({"alpha": 0}, "lora_alpha is 0; it must be a number above 0"),
    ({"r": 0}, "r is 0"),
    ({"rank_pattern": {"q_proj(": 4}}, "no regular expression"),
    ({"alpha_pattern": {"(.*)*(.*)*x": 4}}, "repetitions"),
    ({"rank_pattern": {"q_proj": 4}}, "has rank 8 and 8, adapter_config.json says 4"),
    ({"new_method": {"x": 1}}, "not known"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is .*the base's weights"),
    ({"init_lora_weights": "olora"}, "the base's weights"),
    ({"init_lora_weights": "corda"}, "the base's weights"),
    ({"init_lora_weights": "lora_ga"}, "the base's weights"),
    ({"init_lora_weights": "loftq"}, "the base's weights"),
    ({"init_lora_weights": "of later versions"}, "the base's weights"),
]


@pytest.mark.parametrize(("settings", "why"), SETTINGS, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_settings_that_change_answers_are_refused(
    base: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    given = {"lora_alpha" if key == "alpha" else key: value for key, value in settings.items()}
    refused(adapter_of(base, tmp_path / "a", **given), base, why)


def test_an_adapter_that_peft_trained_beside_changed_weights_is_refused_until_it_is_converted(
    base: Path, tmp_path: Path
) -> None:
    """PiSSA subtracts the adapter that it begins with from the base's weights; ``save_pretrained`` can add it again."""
    peft = pytest.importorskip("peft", reason="peft is among the packages of the tests: pip install peft")
    config = peft.LoraConfig(target_modules=LANGUAGE, r=4, lora_alpha=8, init_lora_weights="pissa")
    adapted = peft.get_peft_model(load_base(base), config)
    adapted.save_pretrained(tmp_path / "begin")
    torch.manual_seed(0)
    for parameter in (p for name, p in adapted.named_parameters() if "lora_" in name):
        parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "raw")
    refused(tmp_path / "raw", base, "init_lora_weights is .pissa.; .*path_initial_model_for_weight_conversion")
    adapted.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "begin"))
    adapted.merge_and_unload().save_pretrained(tmp_path / "theirs")
    assert merge_adapter(base, tmp_path / "converted", tmp_path / "ours") == 14
    same_weights(tmp_path / "ours", tmp_path / "theirs", weights(base))


@pytest.mark.parametrize("kind", [True, False, "gaussian", "eva", "orthogonal", "mica", None])
def test_beginnings_that_leave_the_weights_of_the_base_are_read(base: Path, tmp_path: Path, kind: object) -> None:
    assert read_adapter(adapter_of(base, tmp_path / "a", init_lora_weights=kind), load_config(base)).modules


def refused(folder: Path, base: Path, why: str) -> None:
    with pytest.raises(StartupError, match=why) as caught:
        load_matrices(read_adapter(folder, load_config(base)), load_config(base).text)
    assert "\n" not in str(caught.value)


def test_tensors_that_cannot_be_applied_are_refused(base: Path, tmp_path: Path) -> None:
    made = adapter_of(base, tmp_path / "a") / "adapter_model.safetensors"
    whole = load_file(made)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def altered(change: dict[str, torch.Tensor | None], why: str) -> None:
        save_file({k: v.clone() for k, v in {**whole, **change}.items() if v is not None}, made)
        refused(made.parent, base, why)

    a, b = whole[name], whole[name.replace("_A", "_B")]
    altered({name: a[:, :-1].contiguous()}, "is for another model: .* is .64, 63., .* has .64, 64.")
    altered({name: None}, "only one of lora_A and lora_B")
    altered({name: a.double()}, "has type F64")
    altered({name: a * float("nan")}, "not finite")
    altered({name: (a * float("inf")).to(torch.bfloat16)}, "not finite")
    altered({name: a[0].contiguous()}, "those of an adapter are matrices")
    for other, why in (
        ("model.embed_tokens.lora_embedding_A", "embedding"),
        ("model.layers.0.mlp.gate_proj.lora_magnitude_vector", "DoRA"),
        ("model.layers.0.mlp.gate_proj.lora_B.bias", "a bias"),
        ("model.layers.0.mlp.gate_proj.base_layer.weight", "no tensor of a LoRA adapter"),
    ):
        altered({f"base_model.model.{other}": a}, why)
    for module in ("model.layers.2.self_attn.q_proj", "lm_head", "model.norm", "model.layers.0.mlp.experts.0.up_proj"):
        pair = {f"base_model.model.{module}.lora_{side}.weight": t for side, t in (("A", a), ("B", b))}
        altered({**pair}, "not implemented|no matrix|has no model.layers.2")
    fused = {f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{s}.weight": t for s, t in
             (("A", a), ("B", torch.zeros(128, 8)))}  # fmt: skip
    altered({**fused}, "two adapters for layers.0.self_attn.q_proj")


def test_files_that_are_cut_or_missing_are_refused(base: Path, tmp_path: Path) -> None:
    folder = adapter_of(base, tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        refused(folder, base, "cut short|no header|not a readable")
    file.unlink()
    (folder / "adapter_model.bin").touch()
    refused(folder, base, "adapter_model.bin is not read")
    (folder / "adapter_config.json").unlink()
    refused(folder, base, "holds no LoRA adapter")


def test_folders_stay_inside_the_allowed_one(base: Path, tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", adapter_of(base, tmp_path / "outside")
    inside = adapter_of(base, allowed / "inside")
    assert resolve_folder(str(inside), allowed) == inside.resolve()
    (allowed / "link").symlink_to(outside)
    (inside / "notes").symlink_to(outside / "adapter_config.json")
    for path in (outside, allowed / "link", allowed / ".." / "outside", inside, allowed / "none"):
        with pytest.raises(StartupError, match=r"not inside|link out of the folder|no folder"):
            resolve_folder(str(path), allowed)


PEFT: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 3},
    "rank 8, rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True},
    "rank 64 with patterns": {
        "r": 64, "lora_alpha": 32, "rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.up_proj": 16},
        "alpha_pattern": {"down_proj": 5},
    },
}  # fmt: skip


def trained(base: Path, out: Path, merged: Path, targets: str, settings: dict[str, Any]) -> None:
    """Has peft write a random adapter, and the model that it is merged into."""
    pytest.importorskip("peft", reason="peft is among the packages of the tests: pip install peft")
    adapted = train_with_peft(load_base(base), out, targets, **settings)
    adapted.merge_and_unload().save_pretrained(merged)


@pytest.mark.parametrize("name", PEFT)
def test_a_merged_checkpoint_is_that_of_peft(base: Path, tmp_path: Path, name: str) -> None:
    trained(base, tmp_path / "adapter", tmp_path / "theirs", LANGUAGE, PEFT[name])
    assert merge_adapter(base, tmp_path / "adapter", tmp_path / "ours") == 14
    same_weights(tmp_path / "ours", tmp_path / "theirs", weights(base))
    assert json.loads((tmp_path / "ours/config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert (tmp_path / "ours/tokenizer.json").is_file()


def same_weights(ours: Path, theirs: Path, before: dict[str, torch.Tensor]) -> None:
    got, want = weights(ours), weights(theirs)
    assert set(got) == set(before)
    changed = 0
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)
        changed += not torch.equal(tensor, before[name])
    assert changed


def test_the_tower_and_the_merger_are_merged_too(multimodal: Path, tmp_path: Path) -> None:
    targets = rf"{QWEN_TOWER}|.*layers\.0\.mlp\.\w+_proj"
    trained(multimodal, tmp_path / "adapter", tmp_path / "theirs", targets, {"r": 8, "lora_alpha": 16})
    assert main.main(["merge-lora", str(multimodal), str(tmp_path / "adapter"), str(tmp_path / "ours")]) == 0
    same_weights(tmp_path / "ours", tmp_path / "theirs", weights(multimodal))


def test_what_cannot_be_merged_is_one_line(base: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = adapter_of(base, tmp_path / "a")
    for words, why in (
        (["x"], "needs a checkpoint, an adapter and a new folder"),
        (["--fast", "x", "y", "z"], "does not know --fast"),
        ([str(base), str(adapter), str(base)], "holds something already"),
        ([str(base), str(base), str(tmp_path / "o")], "holds no LoRA adapter"),
    ):
        assert main.main(["merge-lora", *words]) == 2
        line = capsys.readouterr().err
        assert why in line and line.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_names_of_modules_and_defaults(base: Path, tmp_path: Path) -> None:
    assert parse_modules(["a=/x", '{"name": "b", "path": "y", "base_model_name": "c"}']) == [
        NamedAdapter("a", "/x"), NamedAdapter("b", "y", "c"),
    ]  # fmt: skip
    for word in (
        "a",
        "=x",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": "a", "path": 1}',
        '{"name": "a", "path": "b", "x": 1}',
    ):
        with pytest.raises(StartupError, match="--lora-modules"):
            parse_modules([word])
    with pytest.raises(StartupError, match="two adapters the name a; each needs its own"):
        parse_modules(["a=/x", "b=/y", '{"name": "a", "path": "/z"}'])
    with pytest.raises(StartupError, match="There is no folder /no/such of an adapter"):
        find_adapter_folder(EngineConfig(), "/no/such")
    registry = AdapterRegistry(load_config(base), EngineConfig(enable_lora=True, max_loras=2), ("base",), Path)
    folder = str(adapter_of(base, tmp_path / "a"))
    registry.set_defaults({"image": folder, "video": str(adapter_of(base, tmp_path / "b", seed=2))})
    image, video = registry.defaults["image"], registry.defaults["video"]
    assert registry.find_default({"image"}) is image and registry.find_default({"video"}) is video
    assert registry.find_default({"image", "video"}) is None is registry.find_default(set())
    for given in ({"audio": folder}, {"image": str(tmp_path)}):
        with pytest.raises(StartupError):
            registry.set_defaults(given)
    registry.add("x", folder)
    for name, why in (("x", "has already been loaded"), ("base", "base model"), ("", "needs a name")):
        with pytest.raises(StartupError, match=why):
            registry.add(name, folder)
