"""What a family's config.json and weights may say: overrides, windows, unknown keys, tied and doubled tables."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.text_checkpoints import rename, set_keys
from trencadis.backends.cpu.shape_policy import PADDED
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.checkpoint.rope_config import YarnScaling
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

BOS = "<|endoftext|>"
IDS = [*range(5, 60)]


@pytest.fixture
def copied(form: Any, tmp_path: Path) -> Any:
    return lambda family, name: Path(shutil.copytree(form(family, name), tmp_path / family))


def read(path: Path, **flags: Any) -> Any:
    return load_model_config(EngineConfig(model=str(path), **flags))


def test_overrides_are_nested_and_read_before_the_check(copied: Any, oracle: Any) -> None:
    path = copied("qwen3", "plain")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    made = read(path, hf_overrides={"rope_parameters": yarn, "rms_norm_eps": 1e-3}).text
    assert isinstance(made.rope_scaling, YarnScaling) and made.eps == 1e-3
    assert made.rope_theta == read(path).text.rope_theta, "what the override does not name stays"
    with pytest.raises(StartupError, match="rms_norm_eps is -1; it must be a number above 0"):
        read(path, hf_overrides={"rms_norm_eps": -1})
    assert (
        made.max_positions == 2048
        and read(
            path, hf_overrides={"max_position_embeddings": 64, **{"rope_parameters": {**yarn, "rope_theta": 1e4}}}
        ).text.max_positions
        == 256
    )


def test_an_architecture_may_be_overridden(copied: Any) -> None:
    path = copied("mistral", "no window")
    made = read(path, hf_overrides={"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert made.architecture == "LlamaForCausalLM" and made.pooling is None


def test_pooling_overrides_still_ask_for_pooling(copied: Any) -> None:
    with pytest.raises(StartupError, match="--hf-overrides is_matryoshka is for pooling; add --runner pooling"):
        read(copied("opt", "125m"), hf_overrides={"is_matryoshka": True})


def test_a_window_that_no_request_exceeds_is_left_out(copied: Any) -> None:
    path = copied("mistral", "window of the longest request, wide heads")
    for length in (None, 513):
        assert read(path, max_model_len=length).text.window == 512
    assert read(path, max_model_len=512).text.window == 0
    raw = json.loads((path / "config.json").read_text())
    del raw["sliding_window"]
    (path / "config.json").write_text(json.dumps(raw))
    assert read(path, max_model_len=8192, hf_overrides={"max_position_embeddings": 16384}).text.window == 4096
    set_keys(path, sliding_window=None)
    assert read(path).text.window == 0


def test_gemma_reads_the_hubs_layout_as_transformers_own(copied: Any) -> None:
    path = copied("gemma3", "one KV head, linear, untied")
    own = read(path).text
    raw = json.loads((path / "config.json").read_text())
    del raw["rope_parameters"], raw["layer_types"]
    raw |= {
        "rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": {"type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(raw))
    hub = read(path).text
    assert (own.full_layers, hub.full_layers) == ((1,), (1, 3))
    assert replace(hub, full_layers=(1,)) == own and own.window == 33 and own.local_theta == 5e3
    raw["rope_scaling"] = {"type": "yarn", "factor": 8.0}
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(StartupError, match=r'type is "yarn"; implemented: "default", "linear"$'):
        read(path)


def test_a_window_of_some_layers_stays_though_no_request_exceeds_it(copied: Any) -> None:
    """Their rotary table is another one."""
    assert read(copied("gemma3", "windows of 8, four layers"), max_model_len=8).text.window == 8


def test_a_device_without_windows_says_so(copied: Any) -> None:
    from trencadis.core.engine.startup_checks import check_attention

    config = EngineConfig(model=str(copied("mistral", "window of 20")), device="numpy", max_model_len=64)
    policy = replace(PADDED, windows=False, upto=False)
    with pytest.raises(StartupError, match=r"layers see 20 keys, which the numpy backend does not implement"):
        check_attention(config, load_model_config(config), policy)
    check_attention(config, load_model_config(config), PADDED)


def test_unknown_keys_are_one_line(copied: Any, caplog: Any) -> None:
    path = copied("gpt2", "tied")
    assert load_config(path).unread == ()
    set_keys(path, router_aux_loss_coef=0.1, attn_logit_softcap=30.0)
    assert load_config(path).unread == ("attn_logit_softcap", "router_aux_loss_coef")
    from trencadis.server.prompts.media_frontends import MediaRules, make_text_service

    with caplog.at_level(logging.WARNING, "trencadis"):
        make_text_service(EngineConfig(model=str(path)), MediaRules())
    assert [r.message for r in caplog.records] == [
        "config.json has keys that nothing here knows: attn_logit_softcap, router_aux_loss_coef; they are ignored."
    ]


def same_logits(path: Path, oracle: Any) -> bool:
    with torch.no_grad():
        want = oracle(path)(input_ids=torch.tensor([IDS])).logits[0]
    return bool((HandDrivenModel(path).prefill(IDS, 60) - want).abs().max() <= 1e-4 * want.abs().max())


def test_a_tied_table_may_be_stored_under_the_heads_name(copied: Any, form: Any, oracle: Any) -> None:
    path = copied("opt", "125m")
    rename(path, {"model.decoder.embed_tokens.weight": "lm_head.weight"})
    with torch.no_grad():
        want = oracle(form("opt", "125m"))(input_ids=torch.tensor([IDS])).logits[0]
    assert (HandDrivenModel(path).prefill(IDS, 60) - want).abs().max() <= 1e-4 * want.abs().max()


def test_a_weight_that_is_stored_twice(copied: Any) -> None:
    """Equal ones are one weight; others are refused by both names."""
    path = copied("gpt2", "tied")
    file = path / "model.safetensors"
    held = load_file(file)
    held["ln_f.weight"] = held["transformer.ln_f.weight"].clone()
    save_file(held, file)
    HandDrivenModel(path)
    held["ln_f.weight"] += 1
    save_file(held, file)
    with pytest.raises(StartupError, match=r"holds .*ln_f.weight and .*ln_f.weight, which are one weight and differ"):
        HandDrivenModel(path)


def test_a_bos_is_never_there_twice(copied: Any) -> None:
    """A completion's prompt may begin with the BOS that the tokenizer adds; a prompt that names two has two."""
    path = copied("opt", "125m")
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [320], "tokens": [BOS]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(spec))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": BOS}))
    tokenizer = Tokenizer.from_checkpoint(path)
    plain = tokenizer.encode("Hello", add_special_tokens=True)
    assert plain[0] == 320 and plain.count(320) == 1
    assert tokenizer.encode(BOS + "Hello", add_special_tokens=True) == plain
    assert tokenizer.encode(BOS + "Hello") == plain
    assert tokenizer.encode(2 * BOS + "Hello", add_special_tokens=True).count(320) == 3


def test_a_base_model_refuses_chat(copied: Any) -> None:
    path = copied("gpt2", "tied")
    (path / "chat_template.jinja").unlink()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    service = TextService.load(load_config(path), EngineConfig(model=str(path)))
    with pytest.raises(BadRequest, match="no chat template; give one with --chat-template"):
        asyncio.run(service.make_chat_prompt([{"role": "user", "content": "Hello"}]))


def test_a_fused_weight_of_another_size_is_named(copied: Any) -> None:
    path = copied("gpt2", "tied")
    file = path / "model.safetensors"
    held = load_file(file)
    held["transformer.h.1.attn.c_attn.bias"] = torch.zeros(100)
    save_file(held, file)
    with pytest.raises(StartupError, match=r"h\.1\.attn\.c_attn\.bias has 100 output features, config.json asks 192"):
        HandDrivenModel(path)
