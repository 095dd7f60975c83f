"""The text service without a web framework: loading, defaults, choices, the join with real images."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, Unavailable
from trencadis.core.request import Delta, SamplingParams
from trencadis.server.prompts.multimodal_inputs import PlaceholderJoiner
from trencadis.server.prompts.output_processor import ChoiceStream, make_detokenizers
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.prompts.sampling_params import SamplingDefaults, resolve_output_limit
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds


def test_no_web_framework_and_no_torch() -> None:
    code = (
        "import sys, trencadis.server.prompts.prompt_builder, trencadis.server.prompts.output_processor\n"
        "bad = {'fastapi', 'starlette', 'torch', 'transformers', 'uvicorn'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env={"PYTHONPATH": root, "PATH": ""})


def test_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05, "top_p": None, "max_new_tokens": 7})
    )
    read = SamplingDefaults.read(tmp_path)
    assert dict(read.values) == {
        "temperature": 0.1,
        "top_p": 1.0,
        "top_k": 1,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    assert read.max_tokens == 7 and "temperature=0.1" in str(read)
    assert SamplingDefaults.read(tmp_path, override={"temperature": 0.9}).values["temperature"] == 0.9
    assert SamplingDefaults.read(tmp_path, "vllm").values["temperature"] == 1.0
    assert read.cap is None and SamplingDefaults.read(tmp_path, override={"max_new_tokens": 9}).cap == 9
    assert SamplingDefaults.read(Path("/none"), str(tmp_path)).cap == 7
    assert SamplingDefaults.read(Path("/none"), str(tmp_path)).values["top_k"] == 1


def test_output_limit() -> None:
    assert resolve_output_limit("max_tokens", None, None, 10, 100) == 90
    assert resolve_output_limit("max_tokens", None, 5, 10, 100) == 5
    assert resolve_output_limit("max_tokens", None, 500, 10, 100) == 90
    assert resolve_output_limit("max_tokens", 90, 5, 10, 100) == 90
    assert (
        resolve_output_limit("max_tokens", 91, None, 10, 100)
        == resolve_output_limit("max_tokens", 100, None, 10, 100)
        == 90
    )
    assert (
        resolve_output_limit("max_tokens", 80, None, 10, 100, cap=7)
        == resolve_output_limit("max_tokens", None, 9, 10, 100, 7)
        == 7
    )
    assert resolve_output_limit("max_tokens", 3, None, 10, 100, cap=7) == 3
    for requested, prompt in ((101, 10), (1, 100)):
        with pytest.raises(BadRequest):
            resolve_output_limit("max_tokens", requested, None, prompt, 100)


def test_load(harness: Any) -> None:
    service = TextService.load(harness.service.config, EngineConfig(limit_mm_per_prompt={"image": 1}, max_model_len=64))
    assert service.limits.max_images == 1 and service.max_model_len == 64
    prompt = asyncio.run(service.make_chat_prompt([{"role": "user", "content": "Hi"}]))
    assert prompt.text is not None and prompt.text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert service.tokenizer.decode(prompt.tokens, False) == prompt.text


def test_choice_ends(harness: Any) -> None:
    eos = harness.engine.eos
    text = harness.tokenizer.encode("one two")

    def run(deltas: list[Delta], **params: Any) -> tuple[str, str | None, int | str | None]:
        requested = SamplingParams(**params)
        stream = ChoiceStream(make_detokenizers(harness.tokenizer)((), requested.skip_special_tokens), requested, {eos})
        out, last = "", None
        for delta in deltas:
            last = stream.feed(delta)
            out += last.text
            if last.finish_reason:
                break
        assert last is not None
        return out, last.finish_reason, last.stop_reason

    whole = [Delta("r", tokens=[*text, eos], finish="stop")]
    assert run(whole) == ("one two", "stop", None)
    assert run(whole, skip_special_tokens=False) == ("one two", "stop", None)
    assert run(whole, skip_special_tokens=False, include_stop_str_in_output=True)[0] == "one two<|im_end|>"
    assert run(whole, include_stop_str_in_output=True)[0] == "one two"
    pad = harness.tokenizer.find_token_id("<|vision_pad|>")
    inside = [Delta("r", tokens=[*text, pad, eos], finish="stop")]
    assert run(inside) == ("one two", "stop", None)
    assert run(inside, skip_special_tokens=False) == ("one two<|vision_pad|>", "stop", None)
    assert run(inside, skip_special_tokens=False, stop=["<|im_end|>"]) == ("one two<|vision_pad|>", "stop", None)
    cut = [Delta("r", tokens=[*text, eos], finish="length")]
    assert run(cut, skip_special_tokens=False, ignore_eos=True) == ("one two<|im_end|>", "length", None)
    named = [Delta("r", tokens=[*text, pad], finish="stop", stop_token=pad)]
    assert run(named, skip_special_tokens=False, stop_token_ids=[pad]) == ("one two", "stop", pad)
    assert run([Delta("r", tokens=text, finish="length")]) == ("one two", "length", None)
    assert run([Delta("r", tokens=text), Delta("r", finish="abort")]) == ("one two", "abort", None)
    assert run(whole, stop=["e t"]) == ("on", "stop", "e t")
    assert run(whole, stop=["two three"]) == ("one two", "stop", None)
    assert run(whole, stop=["on"], min_tokens=len(text)) == ("one two", "stop", None)
    stop = [Delta("r", tokens=text, finish="stop", stop_token=text[-1])]
    assert run(stop, stop_token_ids=[text[-1]])[1:] == ("stop", text[-1])
    assert run(stop, stop_token_ids=[text[-1]], include_stop_str_in_output=True)[0] == "one two"
    with pytest.raises(Unavailable, match="gone"):
        run([Delta("r", finish="error", status=503, message="gone")])


def test_join_with_the_image_side(harness: Any) -> None:
    pytest.importorskip("trencadis.multimodal.placeholders")
    import numpy as np

    from trencadis.multimodal.processor_interface import PreparedImage

    one_image = PreparedImage("d", np.zeros((24, 1176), np.uint8), (1, 4, 6), 6, 64, (56, 84))
    image = harness.service.config.image_token
    joined = PlaceholderJoiner(harness.service.config)([1, image, 2], [one_image])
    assert joined.tokens == [1, *[image] * 6, 2] and (joined.spans[0].offset, joined.spans[0].length) == (1, 6)
    assert joined.positions is not None
    positions = np.frombuffer(joined.positions, "<i4").reshape(3, 8)
    assert positions[:, 7].tolist() == [4, 4, 4] and joined.delta == 5 - 8
    with pytest.raises(BadRequest, match="placed 1 of 2 images"):
        PlaceholderJoiner(harness.service.config)([1, image, 2], [one_image, one_image])
    assert PlaceholderJoiner(harness.service.config)([1, 2], []).positions is None


def test_an_engine_that_forgets_a_choice_is_an_error(harness: Any) -> None:
    async def nothing(request: Any) -> Any:
        return
        yield

    harness.engine._deltas = nothing
    assert harness.chat().status_code == 500
    assert harness.engine.aborted == [(harness.engine.submitted[0][0].id, -1)]


def test_fake_pixels_are_not_copied(harness: Any) -> None:
    part = SimpleNamespace(resize=None)  # what a PIL image looks like to the parser
    prompt = asyncio.run(
        harness.service.make_chat_prompt([{"role": "user", "content": [{"type": "image", "image": part}]}])
    )
    assert harness.images.received[0][0] is part and prompt.pixels[0] is prompt.images[0].pixels


def test_settings_of_the_server_configuration() -> None:
    config = pytest.importorskip("trencadis.server.config.server_config").ServerConfig
    made = HttpSettings(config(), "org/model", "cpu")
    assert made.served_names == ("org/model",) and made.bounds == Bounds()
    made = HttpSettings(config(served_model_name=["a", "b"], max_num_queued_reqs=5, api_key=["k"]), "x", max_running=3)
    assert made.name == "a" and made.bounds.requests == 8 and made.config.api_key == ["k"]
