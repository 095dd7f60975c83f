"""Routes that vLLM has beside OpenAI's: batches, load, the tokenizer, development; fields of its own; what is a 404."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

JSON = {"content-type": "application/json"}
BATCH = "/v1/chat/completions/batch"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TALKS = [
    [{"role": "user", "content": "One"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [IMAGE]}],
]


def refused(response: Any, status: int, param: str | None = None) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param)
    assert len(error["message"]) < 200 and "\n" not in error["message"]
    return str(error["message"])


def test_a_batch_answers_each_conversation_once(harness: Any) -> None:
    body = harness.call(BATCH, {"messages": TALKS, "max_tokens": 3, "logprobs": True, "return_token_ids": True}).json()
    alone = [
        harness.call("/v1/chat/completions", {"messages": conversation, "max_tokens": 3}).json()
        for conversation in TALKS
    ]
    assert [c["index"] for c in body["choices"]] == [0, 1] and body["object"] == "chat.completion"
    assert [c["message"] for c in body["choices"]] == [one["choices"][0]["message"] for one in alone]
    assert all(c["logprobs"]["content"] and c["token_ids"] for c in body["choices"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == sum(one["usage"][name] for one in alone)
    assert len(harness.engine.submitted) == 4 and len({r.id for r, _ in harness.engine.submitted}) == 4
    assert harness.made is None or harness.made.state.trencadis.admission.inside[0] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [TALKS[0]] * 1025}, "messages"),
        ({"messages": [TALKS[0], []]}, "messages[1]"),
        ({"messages": [TALKS[0], [{"role": "user", "content": [{"type": "hologram"}]}]]}, "messages[1][0].content[0]"),
        ({"messages": [{"role": "user", "content": "One"}]}, "messages[0]"),
    ],
    ids=str,
)
def test_what_a_batch_cannot_do_is_one_line(harness: Any, fields: dict[str, Any], param: str) -> None:
    refused(harness.call(BATCH, {"messages": TALKS, **fields}), 400, param)
    assert not harness.engine.submitted


def test_one_conversation_that_fails_ends_the_others(harness: Any) -> None:
    harness.engine.fail_at = 1
    refused(harness.call(BATCH, {"messages": TALKS}), 503)
    assert harness.call("/load").json() == {"server_load": 0}


def test_load_counts_what_is_inside(harness: Any) -> None:
    app = harness.app()
    ticket = app.state.trencadis.admission.enter(3)
    assert harness.call("/load").json() == {"server_load": 3}
    ticket.leave()
    assert harness.call("/load").json() == {"server_load": 0}


def test_the_tokenizers_settings_need_their_flag(harness: Any, checkpoint: Path) -> None:
    assert harness.call("/tokenizer_info").status_code == 404
    harness.app(enable_tokenizer_info_endpoint=True)
    held = json.loads((checkpoint / "tokenizer_config.json").read_text())
    found = harness.call("/tokenizer_info").json()
    assert found["tokenizer_class"] and found["chat_template"] == harness.service.template.text
    assert {k: found[k] for k in held if k != "chat_template"} == {
        k: v for k, v in held.items() if k != "chat_template"
    }


DEV = ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up")


def test_development_routes_need_their_flag(harness: Any) -> None:
    assert {harness.call(path, method="POST").status_code for path in DEV} == {404}
    assert {harness.call(path).status_code for path in ("/server_info", "/is_sleeping")} == {404}
    harness.app(server_dev_mode=True, api_key=["k"])
    assert {harness.call(path, method="POST").status_code for path in DEV} == {401}, "keys guard them too"


def test_caches_are_reset(harness: Any) -> None:
    harness.app(server_dev_mode=True)
    assert harness.call("/reset_prefix_cache", method="POST").json() == {"success": True}
    assert harness.call("/reset_encoder_cache", method="POST").status_code == 200
    assert harness.engine.resets == ["prefix", "encoder"]
    refused(
        harness.call("/reset_prefix_cache?reset_running_requests=true", method="POST"), 400, "reset_running_requests"
    )
    cache = harness.images.cache
    cache._images["a"], cache.bytes = harness.images, 5
    assert harness.call("/reset_mm_cache", method="POST").status_code == 200 and len(cache) == cache.bytes == 0
    harness.engine.accepting = False
    refused(harness.call("/reset_prefix_cache", method="POST"), 503)


def test_server_info_masks_secrets(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden-1")
    for name in ("DB_PASSWORD", "CREDENTIALS_FILE", "X_SECRET", "HUB_TOKEN"):
        monkeypatch.setenv("VLLM_" + name, "hidden-3")
    harness.app(server_dev_mode=True, api_key=["hidden-2"])
    answer = harness.call("/server_info?config_format=json", headers={"authorization": "Bearer hidden-2"})
    body = answer.json()
    assert body["vllm_config"]["max_logprobs"] == 20 and body["vllm_config"]["server_dev_mode"] is True
    assert body["vllm_env"]["VLLM_API_KEY"] == "****" and body["system_env"]["device"] == "cpu"
    text = harness.call("/server_info", headers={"authorization": "Bearer hidden-2"})
    assert "max_logprobs = 20" in text.json()["vllm_config"] and "hidden-" not in answer.text + text.text


def test_sleep_mode_names_its_flag_where_that_is_not_set(harness: Any) -> None:
    harness.app(server_dev_mode=True)
    for path, method in (("/sleep", "POST"), ("/wake_up", "POST"), ("/is_sleeping", "GET")):
        assert "--enable-sleep-mode" in refused(harness.call(path, method=method), 501)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/audio/transcriptions", "no audio"), ("/v1/audio/speech", "no audio"),
        ("/v1/images/generations", "makes none"), ("/v1/moderations", "moderation"), ("/v1/files", "keeps no files"),
        ("/v1/batches", "/v1/chat/completions/batch"), ("/v1/fine_tuning/jobs", "does not train"),
        ("/v1/nonsense", "No such path: /v1/nonsense"), ("/v1/filesystem", "No such path"),
    ],
)  # fmt: skip
def test_paths_of_openais_that_are_not_served_say_why(harness: Any, path: str, says: str) -> None:
    assert says in refused(harness.call(path, {"model": "m"}), 404)
    if not says.startswith("No such"):
        form = {"content-type": "multipart/form-data; boundary=x"}
        assert says in refused(harness.call(path, method="POST", content=b"--x--", headers=form), 404)


def test_chosen_ids_come_with_each_token(harness: Any) -> None:
    content = harness.chat(logprobs=True, logprob_token_ids=[5, 300], top_logprobs=0).json()["choices"][0]["logprobs"]
    for entry in content["content"]:
        assert [round(t["logprob"], 3) for t in entry["top_logprobs"]] == [-5.0, -300.0]
    shown = harness.complete(logprobs=0, logprob_token_ids=[5, 300], return_tokens_as_token_ids=True).json()
    for place in shown["choices"][0]["logprobs"]["top_logprobs"]:
        assert {"token_id:5", "token_id:300"} <= set(place)


def test_an_echo_begins_with_the_message_that_is_continued(harness: Any) -> None:
    conversation = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": [{"type": "text", "text": "So "}]},
    ]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = harness.chat().json()["choices"][0]["message"]["content"]
    whole = harness.call("/v1/chat/completions", {"messages": conversation, **fields})
    assert whole.json()["choices"][0]["message"]["content"] == "So " + answer
    chunks = harness.events(
        harness.call("/v1/chat/completions", {"messages": conversation, **fields, "stream": True, "n": 2})
    )
    for i in range(2):
        pieces = [c["delta"].get("content") or "" for e in chunks for c in e["choices"] if c["index"] == i]
        assert "".join(pieces) == "So " + answer
    assert harness.chat(echo=True).headers["x-ignored-fields"] == "echo"


def test_beams_reach_the_engine_as_they_are_asked_for(harness: Any) -> None:
    answer = harness.chat(
        use_beam_search=True, n=3, length_penalty=0.5, early_stopping="never", temperature=0.7, seed=4
    )
    request = harness.engine.submitted[-1][0]
    assert (request.beams.length_penalty, request.beams.early_stopping, request.params.n) == (0.5, None, 3)
    assert request.params.greedy and not request.params.needs_state and len(answer.json()["choices"]) == 3
    assert answer.headers["x-ignored-fields"] == "seed,temperature"
    assert harness.chat(length_penalty=0.5).headers["x-ignored-fields"] == "length_penalty"
    harness.complete(use_beam_search=True, best_of=2, n=2)
    drawn, searched = (request for request, _ in harness.engine.submitted[-2:])
    assert drawn.beams is None and searched.beams.early_stopping is False


def test_sixteen_stop_strings_are_allowed(harness: Any) -> None:
    assert harness.chat(stop=[f"stop {i}" for i in range(16)]).status_code == 200
