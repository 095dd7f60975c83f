"""docs/api.md is what the code does, names every field, and no field is taken without effect or a word about it."""

from __future__ import annotations

import pytest

from tests.compat import fields, more_fields
from tests.compat.fields import Case
from tests.compat.page import IGNORED, ROUTES, SILENT, WORKS, Asker, Route, page
from tests.traffic.server_process import ROOT
from trencadis.server.protocol.chat_completions import ChatRequest
from trencadis.server.protocol.completions import CompletionRequest
from trencadis.server.protocol.models_and_tokenize import DetokenizeRequest, TokenizeRequest


@pytest.fixture(scope="module")
def asker() -> Asker:
    return Asker()


def test_the_page_is_what_the_code_does() -> None:
    made, written = page(), (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert made.splitlines() == written.splitlines(), "run tools/gen_api.py"
    assert SILENT not in made


@pytest.mark.parametrize(
    ("name", "case", "verdict"),
    [
        ("seed", Case(3), WORKS),
        ("seed", Case(None), SILENT),
        ("response_format", Case({"type": "text"}), SILENT),
        ("nonsense", Case(1), IGNORED),
        ("temperature", Case(9), "400: temperature must be"),
    ],
)
def test_each_verdict_is_told_from_the_others(asker: Asker, name: str, case: Case, verdict: str) -> None:
    assert asker.verdict(ROUTES[0], name, case).startswith(verdict)


def test_a_path_that_is_not_there_is_told(asker: Asker) -> None:
    assert asker.verdict(Route("/v1/nope", {}, {}), "a", Case(1)).startswith("404: ")


def test_every_field_of_ours_has_a_row() -> None:
    for model, cases in (
        (ChatRequest, fields.CHAT), (CompletionRequest, fields.COMPLETIONS), (TokenizeRequest, fields.TOKENIZE),
        (DetokenizeRequest, fields.DETOKENIZE),
    ):  # fmt: skip
        assert set(model.model_fields) <= set(cases), model.__name__


@pytest.mark.long
def test_every_field_of_the_official_clients_has_a_row() -> None:
    """Newer clients have newer fields: each is to be tried, and gets a row."""
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    for kind, cases in (
        (chat.CompletionCreateParamsBase, fields.CHAT),
        (completion_create_params.CompletionCreateParamsBase, fields.COMPLETIONS),
        (embedding_create_params.EmbeddingCreateParams, more_fields.VECTORS),
        (responses.ResponseCreateParamsBase, more_fields.RESPONSES),
    ):
        assert set(kind.__annotations__) <= set(cases), kind.__name__
    anthropic = pytest.importorskip("anthropic.types.message_create_params")
    assert set(anthropic.MessageCreateParamsBase.__annotations__) <= set(more_fields.MESSAGES)
