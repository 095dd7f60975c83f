"""The pooling routes over a scripted engine: answers as clients parse them, and what is refused, by which field."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.checkpoint.pooling_description import CLASSIFY, Pooling
from trencadis.core.request import Delta, Request
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

WIDTH = 64
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TALK = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what?"}]}]
EMBED = Pooling()
CLASSES = Pooling(CLASSIFY, classes=3, labels=("red", "green", "blue"))
REWARDS = Pooling(CLASSIFY, "all", classes=2, inner="relu", biased=True)
ONE = Pooling(CLASSIFY, classes=1, activation="sigmoid", labels=("LABEL_0",))


def values_of(tokens: list[int], width: int) -> Any:
    """What the scripted engine pools of a prompt."""
    return np.random.default_rng(sum(tokens)).standard_normal(width).astype("<f4")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ScriptedApp]:
    path = write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))

    def make(pooling: Pooling | None = EMBED, **flags: Any) -> ScriptedApp:
        harness = scripted_app(path)
        harness.service.config = replace(harness.service.config, pooling=pooling)
        harness.service.template = harness.service.template  # reads messages by the configuration
        harness.service.min_output_tokens = int(pooling is None)

        async def deltas(request: Request) -> AsyncIterator[Delta]:
            assert pooling is not None and request.pool in ("last", "all")
            count = len(request.tokens) if request.pool == "all" else 1
            values = values_of(request.tokens, count * (pooling.classes or WIDTH))
            yield Delta(request.id, finish="stop", pooled=values.tobytes(), cached_tokens=1)

        harness.engine._deltas = deltas  # type: ignore[method-assign]
        harness.app(**flags)
        return harness

    return make


def test_openais_client_reads_floats_and_base64(start: Callable[..., ScriptedApp]) -> None:
    harness = start()

    async def ask() -> tuple[Any, Any]:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="k",
            http_client=httpx.AsyncClient(transport=httpx.ASGITransport(harness.made)),  # type: ignore[arg-type]
        )  # fmt: skip
        texts = ["Hello", "blue"]
        plain = await client.embeddings.create(model="m", input=texts, encoding_format="float")
        return plain, await client.embeddings.create(model="m", input=texts)

    plain, packed = asyncio.run(ask())
    assert [d.index for d in plain.data] == [0, 1] and plain.object == "list"
    for a, b in zip(plain.data, packed.data, strict=True):
        assert np.array_equal(np.float32(a.embedding), np.float32(b.embedding))
        assert abs(np.linalg.norm(a.embedding) - 1) < 1e-6 and len(a.embedding) == WIDTH
    assert (
        plain.usage.prompt_tokens
        == plain.usage.total_tokens
        == sum(len(r.tokens) for r, _ in harness.engine.submitted[:2])
    )


def test_inputs_of_every_form_give_one_item_each(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    forms: list[tuple[Any, int]] = [("a", 1), ([5, 6], 1), (["a", "b"], 2), ([[5], [6, 7], [8]], 3)]
    for given, count in forms:
        made = harness.call("/v1/embeddings", {"input": given}).json()
        assert [d["index"] for d in made["data"]] == list(range(count)) and made["id"].startswith("embd-")
    raw = harness.call("/v1/embeddings", {"input": [5, 6], "normalize": False}).json()["data"][0]["embedding"]
    assert raw == values_of([5, 6], WIDTH).tolist()
    packed = harness.call("/pooling", {"input": [5, 6], "encoding_format": "base64", "use_activation": False}).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4"), values_of([5, 6], WIDTH))
    conversation = harness.call("/v1/embeddings", {"messages": TALK})
    assert (
        conversation.status_code == 200 and conversation.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 6
    )
    assert harness.engine.submitted[-1][0].spans and len(harness.engine.submitted[-1][1]) == 1


def test_dimensions_cut_first_and_normalise_then(start: Callable[..., ScriptedApp]) -> None:
    harness = start(Pooling(dimensions=(16, 32)))
    made = harness.call("/v1/embeddings", {"input": [5, 6], "dimensions": 16}).json()["data"][0]["embedding"]
    cut = values_of([5, 6], WIDTH).astype(np.float64)[:16]
    np.testing.assert_allclose(made, cut / np.linalg.norm(cut), atol=1e-7)
    for pooling, size in ((Pooling(dimensions=(16, 32)), 17), (Pooling(dimensions=()), 65), (EMBED, 16), (CLASSES, 1)):
        path = "/classify" if pooling is CLASSES else "/v1/embeddings"
        refused = start(pooling).call(path, {"input": "a", "dimensions": size})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


def test_classes_have_names_and_probabilities(start: Callable[..., ScriptedApp]) -> None:
    harness = start(CLASSES)
    (item,) = harness.call("/classify", {"input": [5, 6]}).json()["data"]
    logits = values_of([5, 6], 3).astype(np.float64)
    assert item["label"] == CLASSES.labels[int(logits.argmax())] and item["num_classes"] == 3
    np.testing.assert_allclose(item["probs"], np.exp(logits) / np.exp(logits).sum(), atol=1e-7)
    assert harness.call("/score", {"text_1": "a", "text_2": "b"}).status_code == 400


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/invocations"])
def test_reranking_sorts_documents_by_their_score(path: str, start: Callable[..., ScriptedApp]) -> None:
    harness = start(ONE)
    documents: list[Any] = ["one", "two", {"text": "three"}]
    whole = harness.call(path, {"query": "q", "documents": documents}).json()["results"]
    scores = [r["relevance_score"] for r in whole]
    assert scores == sorted(scores, reverse=True) and sorted(r["index"] for r in whole) == [0, 1, 2]
    assert {r["document"]["text"] for r in whole} == {"one", "two", "three"}
    some = harness.call(path, {"query": "q", "documents": documents, "top_n": 2, "return_documents": False}).json()
    assert [r["index"] for r in some["results"]] == [r["index"] for r in whole[:2]]
    assert "document" not in some["results"][0] and some["usage"]["total_tokens"] > 0
    encode = harness.tokenizer.encode
    requested = {tuple(r.tokens) for r, _ in harness.engine.submitted}
    assert requested == {(*encode("q"), *encode(d)) for d in ("one", "two", "three")}


def test_scores_of_embeddings_are_cosines_and_each_text_runs_once(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")):
        before = len(harness.engine.submitted)
        made = harness.call("/v1/score", dict(zip(names, ("a", ["a", "b", "a"]), strict=True))).json()["data"]
        assert len(harness.engine.submitted) == before + 2
        a, b = (values_of(harness.tokenizer.encode(t), WIDTH).astype(np.float64) for t in "ab")
        wanted = [1, a @ b / np.linalg.norm(a) / np.linalg.norm(b), 1]
        np.testing.assert_allclose([d["score"] for d in made], wanted, atol=1e-6)
    images = {"text_1": {"content": [IMAGE]}, "text_2": ["a"]}
    assert harness.call("/score", images).json()["usage"]["prompt_tokens_details"]["image_tokens"] == 6


def test_label_tokens_judge_pairs_in_a_chat(start: Callable[..., ScriptedApp]) -> None:
    """A chat template that knows no queries: one question with both sides, and the logit of yes against no."""
    harness = start(Pooling(CLASSIFY, classes=2, label_tokens=(7, 8), labels=("no", "yes")))
    body = {"query": "red?", "documents": [{"content": [IMAGE]}], "instruction": "Is it shown?"}
    (found,) = harness.call("/rerank", body).json()["results"]
    (request, pixels) = harness.engine.submitted[-1]
    text = harness.tokenizer.decode(request.tokens, skip_special_tokens=False)
    assert 'Is it shown? Answer with "yes" or "no" only.' in text and "Query: red?\nDocument: " in text
    assert text.endswith("assistant\n") and len(pixels) == 1
    no, yes = values_of(request.tokens, 2).astype(np.float64)
    assert abs(found["relevance_score"] - 1 / (1 + np.exp(no - yes))) < 1e-6


def test_a_template_with_the_roles_gets_both_sides(start: Callable[..., ScriptedApp]) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'query' %}Q={{ m['content'] }};{% endif %}"
        "{% if m['role'] == 'document' %}D={{ m['content'] }}{% endif %}{% endfor %}"
    )
    harness = start(ONE, trust_request_chat_template=True)
    body = {"query": "red?", "documents": ["a rose"], "chat_template": template}
    assert harness.call("/rerank", body).status_code == 200
    assert harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens) == "Q=red?;D=a rose"
    assert start(ONE).call("/rerank", body).status_code == 403, "the operator does not trust templates of requests"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "temperature": 0}, "temperature"),
        ("/v1/embeddings", {"input": "a", "max_tokens": 3}, "max_tokens"),
        ("/rerank", {"query": "a", "documents": ["b"], "stream": True}, "stream"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "messages": TALK}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 1025}, "input"),
        ("/v1/embeddings", {"input": [[4, 5000]]}, "input"),
        ("/v1/embeddings", {"input": [5] * 1025}, "input_tokens"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "png"}, "encoding_format"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "bad"}]}]},
         "messages[0].content[0]"),
        ("/v1/embeddings", {"input": "a", "cache_salt": "@"}, "cache_salt"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/classify", {"input": "a"}, "task"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [3]}, "text_2"),
        ("/score", {}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "instruction": "x"}, "instruction"),
        ("/invocations", {"input": 5}, "input"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_requests_name_the_field(
    path: str, body: dict[str, Any], param: str, start: Callable[..., ScriptedApp]
) -> None:
    harness = start()
    refused = harness.call(path, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    assert harness.made.state.trencadis.admission.inside == [0, 0, 0]  # type: ignore[union-attr]


def test_a_prompt_of_the_whole_length_is_taken(start: Callable[..., ScriptedApp]) -> None:
    """Nothing is generated, so that no token is left for an answer."""
    assert start().call("/v1/embeddings", {"input": [5] * 1024}).status_code == 200


def test_the_other_routes_name_the_servers_task_and_the_flag(start: Callable[..., ScriptedApp]) -> None:
    pools, generates = start(), start(None)
    for path in ("/v1/chat/completions", "/v1/completions"):
        refused = pools.call(path, {"prompt": "a"})
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and "task is embed; --runner generate" in message
    for path in (
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    ):
        refused = generates.call(path, {"input": "a"})
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and "task is generate; --runner pooling" in message
    assert pools.call("/tokenize", {"prompt": "a"}).status_code == 200
    assert pools.call("/v1/embeddings", {"input": "a", "model": "nope"}).status_code == 404


def test_every_token_has_values_where_a_task_asks_for_them(start: Callable[..., ScriptedApp]) -> None:
    """A reward model gives nothing else; other servers give them beside what they pool."""
    requested = {"input": [5, 6, 7]}
    for pooling, task, width in ((REWARDS, None, 2), (CLASSES, "token_classify", 3), (EMBED, "token_embed", WIDTH)):
        body = {**requested, "task": task} if task else requested
        (item,) = start(pooling).call("/pooling", body).json()["data"]
        rows = np.asarray(item["data"])
        assert rows.shape == (3, width)
        assert np.allclose((rows**2).sum(-1) if pooling is EMBED else rows.sum(-1), 1)
        packed = start(pooling).call("/pooling", {**body, "encoding_format": "base64"}).json()["data"][0]["data"]
        assert np.allclose(np.frombuffer(base64.b64decode(packed), "<f4").reshape(3, width), rows)


@pytest.mark.parametrize(
    ("pooling", "path", "body", "tasks"),
    [
        (REWARDS, "/classify", {"input": "a"}, "'token_classify'"),
        (REWARDS, "/v1/embeddings", {"input": "a"}, "'token_classify'"),
        (REWARDS, "/score", {"text_1": "a", "text_2": "b"}, "'token_classify'"),
        (REWARDS, "/rerank", {"query": "a", "documents": ["b"]}, "'token_classify'"),
        (EMBED, "/pooling", {"input": "a", "task": "token_classify"}, "'embed' and 'token_embed'"),
        (CLASSES, "/pooling", {"input": "a", "task": "embed"}, "'classify' and 'token_classify'"),
    ],
)
def test_another_task_is_refused_and_its_own_named(
    pooling: Pooling, path: str, body: dict[str, Any], tasks: str, start: Callable[..., ScriptedApp]
) -> None:
    refused = start(pooling).call(path, body)
    assert refused.status_code == 400 and f"does {tasks}" in refused.json()["error"]["message"]
    plugin = start(pooling).call("/pooling", {"input": "a", "task": "plugin"})
    assert plugin.status_code == 400 and plugin.json()["error"]["message"] == "No IOProcessor plugin installed."


def test_invocations_go_where_their_fields_belong(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    kinds = {"list": {"input": "a"}, "embd": {"messages": TALK}, "score": {"text_1": "a", "text_2": "b"}}
    for prefix, body in kinds.items():
        made = harness.call("/invocations", body).json()
        assert made["id"].startswith(prefix if prefix != "list" else "embd")
    assert start(CLASSES).call("/invocations", {"input": "a"}).json()["id"].startswith("classify")
    for body in ({"input": "a"}, {"messages": TALK}):
        values = start(REWARDS).call("/invocations", body)
        assert values.status_code == 200 and values.json()["id"].startswith("pooling"), values.text


def test_a_full_queue_is_a_429(start: Callable[..., ScriptedApp]) -> None:
    harness = start(bounds=Bounds(requests=4))
    assert harness.call("/v1/embeddings", {"input": ["a"] * 3}).status_code == 200
    harness.made.state.trencadis.admission.enter(2)  # type: ignore[union-attr]
    assert harness.call("/v1/embeddings", {"input": ["a"] * 3}).status_code == 429
