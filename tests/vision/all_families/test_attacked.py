"""Every named attack with images, through each family's processor: refused in time, at no cost, nothing broken."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import app as hostile_app
from tests.hostile.attacks import ATTACKS, GOOD, Attack, Scene, data, lay_out, of_file
from tests.hostile.files import png
from tests.hostile.web import Web
from tests.security.test_attacks import FETCH, Meter, error_message, judge
from tests.vision.all_families.family_list import WRITERS
from tests.vision.tiled_families import COMPARED
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs
from trencadis.core.errors import TrencadisError
from trencadis.multimodal.sources import http_fetch

MARKS = {"gemma3": "<start_of_image>", "mllama": "<|image|>", **{name: one.image for name, one in COMPARED.items()}}
OWN = [
    of_file("PNG of 1 x 10,000", png(1, 10_000), 400), of_file("PNG of 10,000 x 1", png(10_000, 1), 400),
    of_file("PNG of 20,000 squared", png(20_000, 20_000), 413),
]  # fmt: skip
OFFLINE = {a.name: a for a in (*ATTACKS.values(), *OWN) if a.offline}
SOME = [
    *(a.name for a in OWN),
    "GIF of 65535 x 1",
    "PNG of 1 x 1",
    "six images of at most four",
    "video that is a page",
]
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    web = Web(GOOD)
    yield Scene(web, lay_out(tmp_path_factory.mktemp("attacked")))
    assert web.trapped == [], "something behind the server's own address was asked"
    web.close()


@pytest.fixture(scope="module")
def engines(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``engines(family)``; the last one is closed when another is made."""
    made: list[LLM] = []

    @cache
    def engine(family: str) -> LLM:
        while made:
            made.pop().close()
        folder = WRITERS[family](tmp_path_factory.mktemp(family))
        llm = LLM(
            str(folder), dtype="float32", kv_cache_memory_bytes=32 << 20, limit_mm_per_prompt={"image": 4},
            mm_processor_cache_gb=0.0, allowed_local_media_path=scene.root, max_model_len=2048, max_num_seqs=4,
        )  # fmt: skip
        llm.service.images.loader._fetcher.timeout = FETCH
        made.append(llm)
        return llm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_fetch, "is_public", http_fetch.is_public)
        patch.setattr(http_fetch.Fetcher, "_system_resolver", http_fetch.Fetcher._system_resolver)
        hostile_app.install()
        yield engine
        for llm in made:
            llm.close()


def ask(llm: LLM, content: Any) -> Any:
    return llm.chat([{"role": "user", "content": content}], ONE, use_tqdm=False)[0]


def attack_on(llm: LLM, family: str, attack: Attack, scene: Scene) -> None:
    """One attack, and a good image behind it."""
    config = load_config(Path(llm.config.model))
    if attack.before is not None:
        ask(llm, attack.before(scene))
    content = attack.content(scene)
    meter, begun, output = Meter(os.getpid()), time.monotonic(), None
    try:
        output, code = ask(llm, content), 200
    except TrencadisError as error:
        code = error.status
        error_message(error.message, scene)
    wanted = attack
    if attack.name.startswith("video ") and config.video_token < 0:
        wanted = Attack(attack.name, attack.content, 400)  # this model takes none, wherever they lie
    judge(wanted, code, time.monotonic() - begun, meter.extra())
    if output is not None:
        images = sum(part["type"] != "text" for part in content) if isinstance(content, list) else 0
        assert output.num_image_tokens <= 2 * images * image_needs(config, {}).tokens  # ends of lines are tokens, too
        assert output.prompt_token_ids.count(config.image_token) == output.num_image_tokens
    assert ask(llm, [data(GOOD), {"type": "text", "text": "?"}]).num_image_tokens > 0


def typed_marks_stay_text(llm: LLM, family: str) -> None:
    config, mark = load_config(Path(llm.config.model)), MARKS.get(family, "<image>")
    assert ask(llm, mark * 3).prompt_token_ids.count(config.image_token) == 0
    alone = ask(llm, [data(GOOD)]).num_image_tokens
    beside = ask(llm, [{"type": "text", "text": mark * 5}, data(GOOD), {"type": "text", "text": mark}])
    assert beside.prompt_token_ids.count(config.image_token) == beside.num_image_tokens == alone > 0


def options_beyond_the_plan_are_refused(llm: LLM, family: str) -> None:
    mark = MARKS.get(family, "<|vision_start|><|image_pad|><|vision_end|>" if family.startswith("qwen") else "<image>")
    for options in ({"num_crops": 300}, {"max_pixels": 10**18}, {"resized_height": 10**9, "resized_width": 10**9}):
        requested: Any = {
            "prompt": mark, "multi_modal_data": {"image": GOOD}, "mm_processor_kwargs": options
        }  # fmt: skip
        meter, begun = Meter(os.getpid()), time.monotonic()
        with pytest.raises(TrencadisError) as refused:
            llm.generate(requested, ONE, use_tqdm=False)
        judge(Attack("options", status=400), refused.value.status, time.monotonic() - begun, meter.extra())
        assert next(iter(options)) in refused.value.message or "do not apply" in refused.value.message


@pytest.mark.parametrize("family", ["phi3_v"])
def test_some_attacks(family: str, engines: Any, scene: Scene) -> None:
    llm = engines(family)
    for name in SOME:
        attack_on(llm, family, OFFLINE[name], scene)
    typed_marks_stay_text(llm, family)
    options_beyond_the_plan_are_refused(llm, family)


@pytest.mark.long
@pytest.mark.parametrize("family", WRITERS)
def test_every_attack(family: str, engines: Any, scene: Scene) -> None:
    llm, succeeded = engines(family), list[str]()
    for name, attack in OFFLINE.items():
        try:
            attack_on(llm, family, attack, scene)
        except AssertionError as error:
            succeeded.append(f"{name}: {' '.join(str(error).split())[:200]}")
    typed_marks_stay_text(llm, family)
    options_beyond_the_plan_are_refused(llm, family)
    print(f"\n{family}: {len(succeeded)} of {len(OFFLINE)} attacks succeed")
    assert not succeeded, "\n".join(succeeded)
