"""Shapes of the public face: parameters, outputs, tokenizer, options; and what is not built, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import pytest
from tqdm import tqdm

import trencadis
from trencadis import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, SamplingParams, StartupError, TrencadisError
from trencadis.assets import demo_path
from trencadis.core.errors import BadRequest
from trencadis.core.request import UNSUPPORTED
from trencadis.engine_args import build_offline_setup
from trencadis.offline_adapters import LoRARequest
from trencadis.unsupported_vllm_names import UNSUPPORTED_CLASSES, UNSUPPORTED_METHODS, UnsupportedFeature

MODEL = str(demo_path())
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "threads": 1, "max_num_seqs": 4,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **SMALL) as made:
        yield made
    made.close()  # a second time does no harm


# Names


def test_every_public_name_resolves() -> None:
    assert all(getattr(trencadis, name) is not None for name in trencadis.__all__)
    assert set(trencadis.__all__) <= set(dir(trencadis)) and not hasattr(trencadis, "Nonsense")


@pytest.mark.parametrize("name", UNSUPPORTED_CLASSES)
def test_what_is_not_built_imports_and_says_so(name: str) -> None:
    missing = getattr(trencadis, name)
    for use in (missing, lambda: missing.anything):
        with pytest.raises(
            UnsupportedFeature, match=f"{name}.* is not supported: {UNSUPPORTED_CLASSES[name]}"
        ) as caught:
            use()
        assert isinstance(caught.value, TrencadisError) and isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("name", UNSUPPORTED_METHODS)
def test_methods_that_are_not_built_say_so(llm: LLM, name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=rf"LLM\.{name} is not supported: {UNSUPPORTED_METHODS[name]}"):
        getattr(llm, name)(["a"])


# Parameters


def test_sampling_params_can_be_changed_and_copied() -> None:
    params = SamplingParams(stop=None, stop_token_ids=(3,), bad_words=[], seed=1)  # type: ignore[arg-type]
    assert params.stop == [] and params.stop_token_ids == [3] and params.bad_words == []
    params.max_tokens = 5
    copy = params.clone()
    copy.stop_token_ids.append(4)
    assert copy.max_tokens == 5 and params.stop_token_ids == [3] and copy != params
    params.temperature = 9.0
    with pytest.raises(BadRequest, match="temperature"):
        params.clone()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_parameters_that_are_not_built_say_so(name: str) -> None:
    with pytest.raises(BadRequest, match=rf"SamplingParams\.{name} is not supported: ") as caught:
        SamplingParams(**cast("dict[str, Any]", {name: [1]}))
    assert caught.value.param == name and getattr(SamplingParams(**cast("dict[str, Any]", {name: None})), name) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"best_of": 2}, "best_of=2 is not built; n=1"),
        ({"detokenize": False, "stop": "a"}, "stop strings need detokenize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be in"),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be a number of tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name at least one token"),
        ({"bad_words": ["a", " "]}, "bad_words must be texts that are not empty"),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
            "repetition_detection.min_count must be in",
        ),
    ],
    ids=str,
)
def test_contradicting_parameters_are_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        SamplingParams(**given)


# Outputs


def test_outputs_have_vllms_shape(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=4, logprobs=2, prompt_logprobs=1)
    (out,) = llm.generate("The picture shows", params)
    (one,) = out.outputs
    assert out.finished and one.finished() and out.prompt == "The picture shows" and out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids) and out.prompt_logprobs[0] is None
    assert one.logprobs is not None and one.cumulative_logprob is not None and len(one.logprobs) == 4
    total = 0.0
    for token, place in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(place)) == token and len(place) == 2 and place[token].rank == 1
        assert place[token].decoded_token == llm.get_tokenizer().decode([token])
        assert place.token == token and place.logprob == place[token].logprob and len(place.top_ids) == 2
        total += place[token].logprob
    assert abs(total - one.cumulative_logprob) < 1e-6
    when = out.metrics
    assert when is not None and when.first_token_time and when.last_token_time and when.finished_time
    assert when.arrival_time <= when.first_token_time <= when.last_token_time <= when.finished_time
    assert when.num_generation_tokens == 4 and 0 < when.first_token_latency < when.finished_time - when.arrival_time
    (bare,) = llm.generate("The picture shows", SamplingParams(temperature=0, max_tokens=4, detokenize=False))
    assert bare.outputs[0].token_ids == one.token_ids and bare.outputs[0].text == ""
    assert bare.outputs[0].logprobs is None and bare.outputs[0].cumulative_logprob is None


def test_the_prompts_end_is_kept(llm: LLM) -> None:
    (out,) = llm.generate([list(range(40, 60))], SamplingParams(max_tokens=1, truncate_prompt_tokens=3))
    assert out.prompt_token_ids == [57, 58, 59]


def test_ids_win_over_their_text(llm: LLM) -> None:
    prompts: list[Any] = [trencadis.TokensPrompt(prompt_token_ids=[40, 41], prompt="ab"), {"prompt_embeds": 1}]
    (out,) = llm.generate(prompts[0], GREEDY)
    assert out.prompt_token_ids == [40, 41] and out.prompt == "ab"
    with pytest.raises(BadRequest, match="prompt_embeds is not supported"):
        llm.generate(prompts[1], GREEDY)


def test_caches_and_metrics(llm: LLM) -> None:
    def cached() -> int:
        return llm.generate([[44] * 64], GREEDY)[0].num_cached_tokens

    assert cached() == 0 and cached() > 0
    assert llm.reset_prefix_cache() and cached() == 0
    before = {m.name: m for m in llm.get_metrics()}
    cached()
    after: dict[str, Any] = {m.name: m for m in llm.get_metrics()}
    gained = after["vllm:generation_tokens"].value - before["vllm:generation_tokens"].value  # type: ignore[attr-defined]
    assert gained == 4 and after["vllm:prefix_cache_hits"].value > 0 and after["vllm:kv_cache_usage_perc"].value == 0
    seconds = after["vllm:time_to_first_token_seconds"]
    assert seconds.count == seconds.buckets["+Inf"] > 0 and seconds.sum > 0


def test_a_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[tqdm[Any]] = []

    def make(**options: Any) -> tqdm[Any]:
        made.append(tqdm(**options))
        return made[-1]

    llm.generate(["a", "b"], GREEDY, use_tqdm=make)
    assert made[0].n == made[0].total == 2
    assert "Processed prompts" in capsys.readouterr().err
    llm.generate("a", GREEDY)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lora_request": LoRARequest("a", 1, "x")}, "lora_request needs an engine made with enable_lora=True"),
        ({"priority": [1]}, 'scheduling_policy="priority"'),
        ({"priority": [1, 2]}, "1 prompts came with 2 priorities"),
    ],
    ids=["lora", "priority", "priorities"],
)
def test_what_generate_cannot_do_is_one_line(llm: LLM, more: dict[str, Any], says: str) -> None:
    with pytest.raises(TrencadisError, match=says):
        llm.generate("a", GREEDY, **more)
    assert llm.generate("a", GREEDY)[0].finished


def test_an_engines_loop_goes_on_after_a_request_that_fails(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("good", "The image", GREEDY)
    with pytest.raises(BadRequest, match="in use"):
        engine.add_request("good", "again", GREEDY)
    with pytest.raises(BadRequest, match="context length"):
        engine.add_request("long", [40] * 999, GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    assert llm.generate("a", GREEDY)[0].finished
    texts = []
    while engine.has_unfinished_requests():
        texts += [o.outputs[0].text for o in engine.step()]
    assert texts[-1] == llm.generate("The image", GREEDY)[0].outputs[0].text


# Tokenizer


def test_the_tokenizer_has_transformers_calls(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    conversation = [{"role": "user", "content": "Who are you?"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    made = tokenizer.apply_chat_template([conversation, conversation], add_generation_prompt=True)
    (requested,) = llm.chat(conversation, GREEDY)
    assert made.input_ids == [requested.prompt_token_ids] * 2 and requested.prompt == text
    assert tokenizer(text)["input_ids"] == tokenizer.encode(text) == requested.prompt_token_ids
    assert tokenizer(["a", "b"]).attention_mask == [[1], [1]] and len(tokenizer) == tokenizer.vocab_size
    assert (
        tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
        == tokenizer.find_token_id("<|im_end|>")
    )
    assert tokenizer.eos_token_id in tokenizer.all_special_ids and tokenizer.bos_token is tokenizer.bos_token_id is None
    assert tokenizer.batch_decode([[71, 72]]) == [tokenizer.decode([71, 72])] == ["hi"]
    own = tokenizer.apply_chat_template(conversation, chat_template="{{ messages[0].content }}", tokenize=False)
    assert own == "Who are you?" and tokenizer.chat_template
    with pytest.raises(AttributeError):
        _ = tokenizer.nonsense


def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }}")
    assert trencadis.load_chat_template(path) == "{{ messages }}" and trencadis.load_chat_template(None) is None
    assert trencadis.load_chat_template("plain", is_literal=True) == "plain"


# Options


def test_engine_args_are_the_options_of_an_llm() -> None:
    given: Any = EngineArgs(
        MODEL, max_model_len="2k", limit_mm_per_prompt={"image": 2}, task="generate", enable_lora=False
    )
    given.dtype = "float32"
    assert asdict(given)["model"] == MODEL and {f.name for f in fields(cast(Any, AsyncEngineArgs))} > {
        f.name for f in fields(given)
    }
    made = given.create_engine_config()
    assert made == build_offline_setup(MODEL, {k: v for k, v in asdict(given).items() if k != "model"}).config
    assert (made.max_model_len, made.dtype, made.limit_mm_per_prompt) == (2000, "float32", {"image": 2})
    for refused in ({"enable_lora_bias": True}, {"skip_tokenizer_init": True}):
        with pytest.raises(StartupError, match=f"--{next(iter(refused)).replace('_', '-')}.* is refused: "):
            EngineArgs(MODEL, **refused).create_engine_config()
    with pytest.raises(TypeError, match="nonsense"):
        EngineArgs(MODEL, nonsense=1)


def test_a_scripts_command_line_is_engine_args() -> None:
    parser = trencadis.FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    words = [
        "--model",
        MODEL,
        "--max_model_len=2k",
        "--no-enable-prefix-caching",
        "--mm-processor-kwargs",
        '{"fps": 1}',
    ]
    made = EngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
    assert (made.max_model_len, made.enable_prefix_caching, made.mm_processor_kwargs) == (2000, False, {"fps": 1})
    assert "--tensor-parallel-size" in parser.format_help()


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(StartupError, match=r"There is no model folder"):
            make(str(tmp_path / "none"))
    with pytest.raises(StartupError, match="is not a folder"):
        LLM(MODEL, **SMALL, allowed_local_media_path=tmp_path / "none")


def test_an_engine_that_cannot_start_says_why() -> None:
    async def ask() -> None:
        engine = AsyncLLM(MODEL, engine="tests.proc.fake_engine:Missing.create", **SMALL)
        try:
            async for _ in engine.generate("a", GREEDY, "a"):
                pass
        finally:
            assert engine.errored and engine.is_stopped
            engine.shutdown()

    with pytest.raises(StartupError, match=r"Missing|No module"):
        asyncio.run(ask())
