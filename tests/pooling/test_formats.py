"""Embeddings as bytes in every number format, Cohere's route, and texts that are longer than the model."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.scripted_app import ScriptedApp
from tests.pooling.test_routes import CLASSES, EMBED, IMAGE, WIDTH, start, values_of
from trencadis.core.checkpoint.pooling_description import Pooling
from trencadis.server.prompts.pooling_prompts import read_input_prompts
from trencadis.server.protocol.pooler_output import ByteOrder, ValueFormat, encode_values

__all__ = ["start"]

TYPES: dict[ValueFormat, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_each_format_rounds_as_torch_does(dtype: ValueFormat) -> None:
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal(2000) * 10.0**k for k in range(-9, 3)]
    ties = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float().numpy()
    halves = (ties[:-1] + ties[1:]) / 2
    values = np.concatenate([*parts, [0.0, -0.0, 1.0], halves[np.isfinite(halves) & (np.abs(halves) < 440)]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(TYPES[dtype])
    found = torch.frombuffer(bytearray(encode_values(values, dtype, "native")), dtype=TYPES[dtype])
    assert torch.equal(found.float(), expected.float())


def test_big_endian_swaps_the_bytes_of_each_value() -> None:
    values = np.array([1.5, -2.25], np.float32)
    assert encode_values(values, "float32", "big") == values.astype(">f4").tobytes()
    assert encode_values(values, "bfloat16", "big") == bytes.fromhex("3fc0c010")
    assert encode_values(values, "fp8_e4m3", "big") == encode_values(values, "fp8_e4m3", "little")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("order", ["little", "big"])
def test_bytes_are_described_by_a_header(start: Callable[..., ScriptedApp], path: str, order: ByteOrder) -> None:
    harness, inputs = start(), [[5, 6], [7, 8, 9]]
    body = {"input": inputs, "encoding_format": "bytes", "embed_dtype": "float16", "endianness": order,
            "use_activation": False}  # fmt: skip
    answer = harness.call(path, body)
    assert answer.headers["content-type"] == "application/octet-stream"
    head = json.loads(answer.headers["metadata"])
    assert head["usage"] == {"prompt_tokens": 5, "total_tokens": 5} and head["model"] == "m" and head["created"]
    kind = "<f2" if order == "little" else ">f2"
    for item, tokens in zip(head["data"], inputs, strict=True):
        found = np.frombuffer(answer.content[item["start"] : item["end"]], kind).reshape(item["shape"])
        np.testing.assert_array_equal(found, values_of(tokens, WIDTH).astype(np.float16))
        assert (item["embed_dtype"], item["endianness"]) == ("float16", order)
    assert head["data"][-1]["end"] == len(answer.content)
    plain = harness.call(path, {**body, "encoding_format": "bytes_only"})
    assert plain.content == answer.content and "metadata" not in plain.headers


def test_base64_has_the_format_too_and_floats_have_none(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    body = {"input": [5, 6], "use_activation": False, "embed_dtype": "bfloat16", "endianness": "big"}
    packed = harness.call("/v1/embeddings", {**body, "encoding_format": "base64"})
    raw = base64.b64decode(packed.json()["data"][0]["embedding"])
    assert raw == encode_values(values_of([5, 6], WIDTH), "bfloat16", "big")
    assert "x-ignored-fields" not in packed.headers
    assert harness.call("/v1/embeddings", body).headers["x-ignored-fields"] == "embed_dtype,endianness"


def test_a_header_describes_no_more_than_clients_read(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    body = {"input": [[5]] * 256, "encoding_format": "bytes"}
    assert len(harness.call("/v1/embeddings", body).headers["metadata"]) < 32768
    refused = harness.call("/v1/embeddings", {**body, "input": [[5]] * 257})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "encoding_format"
    assert harness.call("/v1/embeddings", {**body, "input": [[5]] * 257, "encoding_format": "bytes_only"}).is_success
    for name in ("encoding_format", "embed_dtype", "endianness"):
        wrong = harness.call("/pooling", {"input": "a", name: "hex"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name


# Texts in parts


@pytest.mark.parametrize("normal", [True, False])
def test_a_text_longer_than_the_model_is_the_mean_of_its_parts(start: Callable[..., ScriptedApp], normal: bool) -> None:
    harness = start(replace(EMBED, chunked=True, longest=3000))
    tokens = [5 + i % 50 for i in range(2500)]
    body = {"input": [[7, 8], tokens], "use_activation": normal}
    short, long = (item["embedding"] for item in harness.call("/v1/embeddings", body).json()["data"])
    parts = [tokens[at : at + 1024] for at in range(0, 2500, 1024)]
    whole = sum(values_of(part, WIDTH).astype(np.float64) * len(part) for part in parts) / 2500
    np.testing.assert_allclose(long, whole / np.linalg.norm(whole) if normal else whole, atol=1e-6)
    alone = values_of([7, 8], WIDTH).astype(np.float64)
    np.testing.assert_allclose(short, alone / np.linalg.norm(alone) if normal else alone, atol=1e-6)
    assert [len(r.tokens) for r, _ in harness.engine.submitted] == [2, 1024, 1024, 452]
    text = harness.call("/v1/embeddings", {"input": "a b " * 700})
    assert text.status_code == 200 and text.json()["usage"]["prompt_tokens"] > 1024


def test_lengths_above_the_flag_are_refused(start: Callable[..., ScriptedApp]) -> None:
    chunked = start(replace(EMBED, chunked=True, longest=1500))
    assert chunked.call("/v1/embeddings", {"input": [5] * 1500}).is_success
    assert chunked.call("/v1/embeddings", {"input": [5] * 1501}).json()["error"]["message"].startswith("input has 1501")
    every = chunked.call("/pooling", {"input": [5] * 1100, "task": "token_embed"})
    assert every.status_code == 400 and every.json()["error"]["param"] == "input_tokens"
    below = start(replace(EMBED, longest=3))
    assert below.call("/v1/embeddings", {"input": [5, 6, 7]}).status_code == 200
    assert below.call("/v1/embeddings", {"input": [5, 6, 7, 8]}).json()["error"]["param"] == "input"
    empty = start(replace(EMBED, chunked=True)).call("/v1/embeddings", {"input": ["", "a"]})
    assert empty.status_code == 400 and empty.json()["error"]["param"] == "input"


# Cohere


def test_cohere_answers_each_form(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    body = {"texts": ["one", "two"], "embedding_types": ["float", "binary", "ubinary", "base64"], "model": "m"}
    made = harness.call("/v2/embed", body).json()
    assert made["texts"] == ["one", "two"] and made["id"].startswith("embd-")
    found = [r.tokens for r, _ in harness.engine.submitted]
    assert made["meta"]["tokens"]["input_tokens"] == sum(map(len, found))
    for i, tokens in enumerate(found):
        raw = values_of(tokens, WIDTH).astype(np.float64)
        vector = made["embeddings"]["float"][i]
        np.testing.assert_allclose(vector, raw / np.linalg.norm(raw), atol=1e-6)
        bits = np.packbits(np.asarray(vector) >= 0).tolist()
        assert made["embeddings"]["ubinary"][i] == bits and made["embeddings"]["binary"][i] == [b - 128 for b in bits]
        packed = np.frombuffer(base64.b64decode(made["embeddings"]["base64"][i]), "<f4")
        np.testing.assert_allclose(packed, vector, atol=1e-7)
    assert set(harness.call("/v2/embed", {"texts": ["a"]}).json()["embeddings"]) == {"float"}


def test_cohere_takes_images_and_mixed_inputs(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    url: Any = IMAGE["image_url"]["url"]  # type: ignore[index]
    assert len(harness.call("/v2/embed", {"images": [url, url]}).json()["embeddings"]["float"]) == 2
    mixed = {"content": [{"type": "text", "text": "What?"}, IMAGE]}
    answer = harness.call("/v2/embed", {"inputs": [mixed]}).json()
    assert len(answer["embeddings"]["float"]) == 1 and "texts" not in answer
    assert all(request.spans for request, _ in harness.engine.submitted)


def test_cohere_cuts_the_end_the_start_or_nothing(start: Callable[..., ScriptedApp]) -> None:
    harness, text = start(), "one two three four five six"
    whole = harness.tokenizer.encode(text)
    for truncate, kept in (("END", whole[:3]), ("START", whole[-3:])):
        assert harness.call("/v2/embed", {"texts": [text], "truncate": truncate, "max_tokens": 3}).is_success
        assert harness.engine.submitted[-1][0].tokens == kept
    refused = harness.call("/v2/embed", {"texts": [text], "truncate": "NONE", "max_tokens": 3})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "texts"
    assert harness.call("/v2/embed", {"texts": ["a b " * 700]}).is_success, "cut at the model's length"
    assert not harness.call("/v2/embed", {"texts": ["a b " * 700], "truncate": "NONE"}).is_success


def test_cohere_refuses_by_field(start: Callable[..., ScriptedApp]) -> None:
    harness = start()
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "texts"), ({"texts": []}, "texts"), ({"texts": ["a"], "images": ["b"]}, "texts"),
        ({"texts": [""]}, "texts"), ({"texts": ["a"], "output_dimension": 8}, "dimensions"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"), ({"inputs": [5]}, "inputs[0]"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"), ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "input_type": "search_query"}, "input_type"),
        ({"texts": ["a"], "temperature": 1}, "temperature"), ({"inputs": [{"content": []}]}, "inputs[0]"),
    ]  # fmt: skip
    for body, param in cases:
        refused = harness.call("/v2/embed", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body
    assert start(CLASSES).call("/v2/embed", {"texts": ["a"]}).status_code == 400
    assert start(Pooling(dimensions=())).call(
        "/v2/embed", {"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 12}
    ).json()["error"]["param"] == "embedding_types"  # fmt: skip


def test_kinds_of_inputs_come_from_the_checkpoint(start: Callable[..., ScriptedApp], tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "query: ", "document": 5}}')
    assert read_input_prompts(tmp_path) == {"query": "query: "}
    harness = start()
    harness.service.config = replace(harness.service.config, path=tmp_path)
    harness.app()
    assert harness.call("/v2/embed", {"texts": ["one"], "input_type": "query"}).json()["texts"] == ["one"]
    assert harness.engine.submitted[-1][0].tokens == harness.tokenizer.encode("query: one")
    refused = harness.call("/v2/embed", {"texts": ["one"], "input_type": "classification"})
    assert "one of query is needed" in refused.json()["error"]["message"]
    (tmp_path / "config.json").write_text('{"task_instructions": {"search": "s "}}')
    assert read_input_prompts(tmp_path) == {"search": "s "}
