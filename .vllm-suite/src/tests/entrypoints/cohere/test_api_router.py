# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Unit tests for ``vllm/entrypoints/cohere/api_router.py``.

Covers:

* The optional-import guard: ``attach_router`` is a no-op when the
  ``cohere`` SDK isn't installed.
* The env-var opt-in gate: ``attach_router`` is a no-op unless
  ``VLLM_ENABLE_COHERE_API=1`` is set.
* The router wiring: response shapes (JSON + SSE), error translation,
  and the ``cohere_serving_chat_v2 is None`` fallback (501 Not
  Implemented).
* The render route (``POST /cohere/v2/chat/render``): that the v2 body
  reaches :class:`ServingRender` as a converted ``ChatCompletionRequest``
  and that the resulting ``GenerateRequest`` is returned verbatim.
"""

import json
from argparse import Namespace
from collections.abc import AsyncGenerator
from http import HTTPStatus

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient

from vllm.entrypoints.cohere import api_router as api_router_mod
from vllm.entrypoints.cohere.api_router import attach_router
from vllm.entrypoints.cohere.protocol import (
    AssistantMessageResponse,
    CohereChatV2Response,
)
from vllm.entrypoints.cohere.serving import (
    _API_SERVER_ONLY_TEMPLATE_KWARGS,
    CohereServingChatV2,
)
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateRequest,
    ReasoningParserKwargs,
)
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.http import (
    http_exception_handler,
)
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    validation_exception_handler,
)
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import (
    vllm_error_handler,
)
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def _enable_cohere_api(monkeypatch):
    """Auto-enable the Cohere API gate for every test in this module.

    The endpoint is opt-in in production (``VLLM_ENABLE_COHERE_API=1``);
    every test in this file exercises the enabled path *except* the
    dedicated gate test in :class:`TestEnvVarGate`, which unsets the
    flag inside the test body.
    """
    monkeypatch.setenv("VLLM_ENABLE_COHERE_API", "1")


# ----------------------------------------------------------------------
# Fakes
# ----------------------------------------------------------------------


class _Handler:
    """Minimal stand-in for :class:`CohereServingChatV2` used by the
    router. Each test sets ``self.result`` to either:

    * a :class:`CohereChatV2Response` (non-streaming JSON path);
    * an async generator yielding SSE frames (streaming path);
    * an :class:`ErrorResponse` (error envelope path); or
    * an exception (router-level error path).
    """

    def __init__(self, result):
        self.result = result

    async def create_chat_v2(self, request, raw_request):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class _RenderChatHandler:
    """Stand-in for :class:`CohereServingChatV2` on the render route.

    Only ``to_chat_completion_request`` is reachable from
    ``/cohere/v2/chat/render``, and it delegates to the real conversion
    classmethod (which needs no engine or tokenizer) so the tests
    exercise the actual v2 -> ``ChatCompletionRequest`` translation
    rather than a stub of it.
    """

    def to_chat_completion_request(self, request):
        return CohereServingChatV2._convert_v2_to_chat_completion(request)

    def _engine_chat_template_kwargs(self, chat_template_kwargs):
        return CohereServingChatV2._engine_chat_template_kwargs(
            self,  # type: ignore[arg-type]
            chat_template_kwargs,
        )


class _RenderHandler:
    """Minimal stand-in for :class:`ServingRender`.

    Records the ``ChatCompletionRequest`` it was handed so tests can
    assert on the conversion, and returns ``self.result`` - either a
    :class:`GenerateRequest`, an :class:`ErrorResponse`, or an exception
    to raise.
    """

    def __init__(self, result):
        self.result = result
        self.seen_request = None
        self.seen_kwargs_filter = None

    async def render_chat_request(self, request, engine_chat_template_kwargs=None):
        self.seen_request = request
        self.seen_kwargs_filter = engine_chat_template_kwargs
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def _generate_request() -> GenerateRequest:
    return GenerateRequest(
        request_id="chatcmpl-abc",
        token_ids=[5, 6, 7],
        sampling_params=SamplingParams(temperature=0.25),
        model="m",
    )


def _build_app(handler: _Handler | None, *, enable_scale_out: bool = True) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(enable_scale_out=enable_scale_out, tokens_only=False)
    attach_router(app)
    app.state.cohere_serving_chat_v2 = handler
    return app


def _build_render_app(
    chat_handler, render_handler, *, enable_scale_out: bool = True
) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(enable_scale_out=enable_scale_out, tokens_only=False)
    attach_router(app)
    app.state.cohere_serving_chat_v2 = chat_handler
    app.state.serving_render = render_handler
    return app


def _build_app_with_vllm_handlers(handler: _Handler | None) -> FastAPI:
    """Build a FastAPI app that mirrors the real vLLM setup by installing
    validation, HTTP, and vLLM exception handlers. The
    :class:`CohereErrorEnvelopeMiddleware` registered by ``attach_router``
    is expected to translate any resulting vLLM ``ErrorResponse`` body
    into the ``CohereError`` wire shape.
    """
    app = FastAPI()
    # ``validation_exception_handler`` reads ``req.app.state.args``; the
    # real cli builds this via argparse.
    app.state.args = Namespace(
        log_error_stack=False, enable_scale_out=True, tokens_only=False
    )
    attach_router(app)
    app.state.cohere_serving_chat_v2 = handler
    app.exception_handler(RequestValidationError)(validation_exception_handler)
    app.exception_handler(HTTPException)(http_exception_handler)
    app.exception_handler(VLLMError)(vllm_error_handler)
    return app


def _minimal_request_body() -> dict:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
    }


# ----------------------------------------------------------------------
# Optional-import guard
# ----------------------------------------------------------------------


class TestOptionalCohereImport:
    """``attach_router`` probes for the SDK once at module load (because
    the route handler uses types imported from ``cohere``) and stashes
     the result in ``_SDK_AVAILABLE``. Tests simulate the "SDK missing"
    state by flipping that flag for the duration of the test.

    ``attach_router`` checks the env-var gate before the SDK probe, so
    the SDK-missing branch is only reachable when the operator opts in
    via ``VLLM_ENABLE_COHERE_API=1``. The flag-off-and-SDK-missing case
    below exists to pin down that ordering — the flag-off short-circuits
    """

    def test_flag_off_and_sdk_missing_stays_silent_about_sdk(self, monkeypatch, caplog):
        """Flag off doesn't do SDK-missing check.

        When the operator hasn't opted in, ``attach_router`` must not
        warn about the ``cohere`` SDK being missing: they never asked
        for the endpoint, so surfacing the SDK gap is misleading noise.
        Only the flag-off DEBUG message should fire.
        """
        monkeypatch.delenv("VLLM_ENABLE_COHERE_API", raising=False)
        monkeypatch.setattr(api_router_mod, "_SDK_AVAILABLE", False)

        with caplog.at_level("DEBUG", logger="vllm.entrypoints.cohere.api_router"):
            app = FastAPI()
            attach_router(app)

        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat" not in paths
        # The flag-off short-circuit ran; the SDK check never did.
        assert not any(
            "SDK is not installed" in rec.message for rec in caplog.records
        ), "SDK-missing log leaked despite the flag being off"

    def test_flag_on_but_sdk_missing_logs_warning(self, monkeypatch, caplog):
        """Misconfiguration path: the operator explicitly opted into the
        endpoint via ``VLLM_ENABLE_COHERE_API=1`` (already set by the
        autouse fixture) but forgot to install ``cohere``.
        """
        monkeypatch.setattr(api_router_mod, "_SDK_AVAILABLE", False)

        with caplog.at_level("DEBUG", logger="vllm.entrypoints.cohere.api_router"):
            app = FastAPI()
            attach_router(app)

        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat" not in paths
        warn_sdk_records = [
            rec
            for rec in caplog.records
            if "VLLM_ENABLE_COHERE_API=1" in rec.message
            and "SDK is not installed" in rec.message
        ]
        assert warn_sdk_records, (
            "expected a WARNING that pairs the opt-in flag with the "
            "missing SDK so operators notice the misconfiguration"
        )
        assert all(rec.levelname == "WARNING" for rec in warn_sdk_records)

    def test_attach_router_registers_route_when_cohere_present(self):
        app = _build_app(handler=None)
        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat" in paths


# ----------------------------------------------------------------------
# VLLM_ENABLE_COHERE_API gate
# ----------------------------------------------------------------------


class TestEnvVarGate:
    """The Cohere v2 endpoint is opt-in via ``VLLM_ENABLE_COHERE_API``.

    Even with the SDK installed, :func:`attach_router` must skip route
    registration and middleware installation unless the env flag is
    set. The autouse fixture on this module enables the flag by
    default, so each test here explicitly disables it.
    """

    def test_attach_router_noop_when_flag_unset(self, monkeypatch, caplog):
        monkeypatch.delenv("VLLM_ENABLE_COHERE_API", raising=False)

        # The flag-off skip logs at DEBUG on purpose: this is the default
        # state for every non-Cohere vLLM deployment, so an INFO log on
        # every server startup would be pointless noise. The test raises
        # caplog's level accordingly.
        with caplog.at_level("DEBUG", logger="vllm.entrypoints.cohere.api_router"):
            app = FastAPI()
            attach_router(app)

        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat" not in paths
        debug_flag_records = [
            rec
            for rec in caplog.records
            if "VLLM_ENABLE_COHERE_API is not set" in rec.message
        ]
        assert debug_flag_records, (
            "expected a DEBUG message that the cohere flag is off"
        )
        assert all(rec.levelname == "DEBUG" for rec in debug_flag_records)

    def test_attach_router_noop_when_flag_zero(self, monkeypatch):
        monkeypatch.setenv("VLLM_ENABLE_COHERE_API", "0")

        app = FastAPI()
        attach_router(app)

        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat" not in paths


# ----------------------------------------------------------------------
# Endpoint behavior
# ----------------------------------------------------------------------


class TestEndpoint:
    def test_501_when_handler_missing(self):
        app = _build_app(handler=None)
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.NOT_IMPLEMENTED
        body = r.json()
        assert "does not support" in body["message"]
        assert "id" not in body  # excluded by ``exclude_none=True``

    def test_non_streaming_response_is_json(self):
        msg = AssistantMessageResponse(content=[{"type": "text", "text": "hello"}])
        result = CohereChatV2Response(id="r1", finish_reason="COMPLETE", message=msg)
        app = _build_app(handler=_Handler(result))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.OK
        assert r.headers["content-type"].startswith("application/json")
        body = r.json()
        assert body["id"] == "r1"
        assert body["finish_reason"] == "COMPLETE"
        assert body["message"]["content"][0]["text"] == "hello"

    def test_streaming_response_is_sse(self):
        async def _gen() -> AsyncGenerator[str, None]:
            yield 'data: {"type":"message-start"}\n\n'
            yield "data: [DONE]\n\n"

        app = _build_app(handler=_Handler(_gen()))
        with TestClient(app) as client:
            r = client.post(
                "/cohere/v2/chat",
                json={**_minimal_request_body(), "stream": True},
            )
        assert r.status_code == HTTPStatus.OK
        assert r.headers["content-type"].startswith("text/event-stream")
        body = r.text
        assert "message-start" in body
        assert body.rstrip().endswith("[DONE]")

    def test_error_response_translated_to_cohere_envelope(self):
        err = ErrorResponse(
            error=ErrorInfo(
                message="bad request",
                type="bad_request",
                code=400,
            )
        )
        app = _build_app(handler=_Handler(err))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.BAD_REQUEST
        body = r.json()
        assert body == {"message": "bad request"}

    def test_handler_exception_returns_500_envelope(self):
        app = _build_app(handler=_Handler(RuntimeError("kaboom")))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        body = r.json()
        assert body == {"message": "kaboom"}

    @pytest.mark.parametrize(
        "exc",
        [
            VLLMValidationError("bad temperature", parameter="temperature"),
            ValueError("bad temperature"),
        ],
        ids=["vllm_validation_error", "value_error"],
    )
    def test_handler_client_error_returns_400_envelope(self, exc):
        """Client-caused handler errors are 4xx, matching the OpenAI routes."""
        app = _build_app(handler=_Handler(exc))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.BAD_REQUEST
        assert "bad temperature" in r.json()["message"]

    def test_non_json_content_type_rejected(self):
        """The ``validate_json_request`` dependency raises
        ``RequestValidationError`` (HTTP 422) for non-JSON content
        types, matching the behavior of the other vLLM API routers.
        """
        app = _build_app(handler=None)
        with TestClient(app) as client:
            r = client.post(
                "/cohere/v2/chat",
                content=json.dumps(_minimal_request_body()),
                headers={"content-type": "text/plain"},
            )
        assert r.status_code == HTTPStatus.UNPROCESSABLE_ENTITY

    def test_invalid_body_returns_422(self):
        # ``model`` is required; omit it to trip Pydantic validation.
        app = _build_app(handler=None)
        with TestClient(app) as client:
            r = client.post(
                "/cohere/v2/chat",
                json={"messages": [{"role": "user", "content": "hi"}]},
            )
        assert r.status_code == HTTPStatus.UNPROCESSABLE_ENTITY


# ----------------------------------------------------------------------
# Render endpoint
# ----------------------------------------------------------------------


class TestRenderEndpoint:
    """``POST /cohere/v2/chat/render`` is the Cohere counterpart to
    ``POST /v1/chat/completions/render``: it converts the v2 body to a
    ``ChatCompletionRequest`` and hands it to the shared
    ``ServingRender``, returning the resulting ``GenerateRequest``
    instead of running generation.

    The route therefore spans *two* app-state handlers, and these tests
    pin both halves: that the conversion preserves the Cohere-specific
    request surface, and that the render handler's output (or error)
    reaches the client unchanged.
    """

    def test_route_registered(self):
        app = _build_render_app(_RenderChatHandler(), _RenderHandler(None))
        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat/render" in paths

    def test_route_not_registered_when_flag_unset(self):
        app = _build_app(handler=None, enable_scale_out=False)
        paths = [getattr(r, "path", None) for r in app.routes]
        assert "/cohere/v2/chat/render" not in paths
        assert "/cohere/v2/chat" in paths

    def test_returns_generate_request_json(self):
        render_handler = _RenderHandler(_generate_request())
        app = _build_render_app(_RenderChatHandler(), render_handler)
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.OK
        assert r.headers["content-type"].startswith("application/json")
        body = r.json()
        assert body["request_id"] == "chatcmpl-abc"
        assert body["token_ids"] == [5, 6, 7]
        assert body["sampling_params"]["temperature"] == 0.25
        # The body must be a wire-valid GenerateRequest so callers can
        # feed it straight back to /v1/generate.
        assert GenerateRequest.model_validate(body).token_ids == [5, 6, 7]

    def test_cohere_request_surface_survives_conversion(self):
        """The point of routing through ``CohereServingChatV2`` rather
        than asking callers to pre-convert: Cohere-only fields
        (``documents``, ``safety_mode``, ``citation_options``) must land
        in ``chat_template_kwargs`` so the rendered prompt matches what
        ``/cohere/v2/chat`` would have produced.
        """
        render_handler = _RenderHandler(_generate_request())
        app = _build_render_app(_RenderChatHandler(), render_handler)
        body = {
            **_minimal_request_body(),
            "documents": [{"id": "doc-1", "data": {"text": "Paris is in France."}}],
            "safety_mode": "STRICT",
            "max_tokens": 32,
        }
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=body)
        assert r.status_code == HTTPStatus.OK

        seen = render_handler.seen_request
        assert seen is not None
        assert seen.model == "m"
        assert seen.messages[0]["content"] == "hi"
        # ``max_tokens`` matters because ServingRender feeds it to
        # ``get_max_tokens`` when building sampling params.
        assert seen.max_completion_tokens == 32
        kwargs = seen.chat_template_kwargs or {}
        assert kwargs["documents"][0]["id"] == "doc-1"
        # The conversion lower-cases safety_mode for the renderer.
        assert kwargs["safety_mode"] == "strict"

    def test_api_server_only_kwargs_not_forwarded(self):
        """As on ``/cohere/v2/chat``, the engine's reasoning parser and the
        derender ``parse_context`` must not receive the template kwargs that
        only the API server reads. Their tuple keys can't be JSON encoded."""
        kwargs = {
            "safety_mode": "strict",
            **dict.fromkeys(_API_SERVER_ONLY_TEMPLATE_KWARGS, {(0, 0): "x"}),
        }
        result = _generate_request()
        result.reasoning_parser_kwargs = ReasoningParserKwargs(
            chat_template_kwargs=kwargs
        )
        render_handler = _RenderHandler(result)
        app = _build_render_app(_RenderChatHandler(), render_handler)
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.OK
        assert r.json()["reasoning_parser_kwargs"] == {
            "chat_template_kwargs": {"safety_mode": "strict"}
        }
        assert render_handler.seen_kwargs_filter is not None
        assert render_handler.seen_kwargs_filter(kwargs) == {"safety_mode": "strict"}

    def test_501_when_chat_handler_missing(self):
        app = _build_render_app(None, _RenderHandler(_generate_request()))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.NOT_IMPLEMENTED
        assert "does not support" in r.json()["message"]

    def test_501_when_render_handler_missing(self):
        # A server without ``serving_render`` in app state (e.g. a
        # non-generate task set) can't render, even though the Cohere
        # chat handler exists.
        app = _build_render_app(_RenderChatHandler(), None)
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.NOT_IMPLEMENTED
        assert "does not support" in r.json()["message"]

    def test_error_response_translated_to_cohere_envelope(self):
        err = ErrorResponse(
            error=ErrorInfo(message="unknown model", type="NotFound", code=404)
        )
        app = _build_render_app(_RenderChatHandler(), _RenderHandler(err))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.NOT_FOUND
        assert r.json() == {"message": "unknown model"}

    def test_render_exception_returns_500_envelope(self):
        app = _build_render_app(
            _RenderChatHandler(), _RenderHandler(RuntimeError("tokenizer exploded"))
        )
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        assert r.json() == {"message": "tokenizer exploded"}

    def test_conversion_client_error_returns_400_envelope(self):
        """Conversion runs inside the same ``try`` as the render call, so
        a bad v2 body that slips past Pydantic still yields a 4xx in the
        Cohere error envelope rather than an unhandled 500 with vLLM's shape.
        """

        class _Boom:
            def to_chat_completion_request(self, request):
                raise ValueError("unconvertible message")

        app = _build_render_app(_Boom(), _RenderHandler(_generate_request()))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat/render", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.BAD_REQUEST
        assert r.json() == {"message": "unconvertible message"}

    def test_invalid_body_returns_422(self):
        app = _build_render_app(_RenderChatHandler(), _RenderHandler(None))
        with TestClient(app) as client:
            r = client.post(
                "/cohere/v2/chat/render",
                json={"messages": [{"role": "user", "content": "hi"}]},
            )
        assert r.status_code == HTTPStatus.UNPROCESSABLE_ENTITY


# ----------------------------------------------------------------------
# CohereErrorEnvelopeMiddleware
# ----------------------------------------------------------------------


class TestCohereErrorEnvelope:
    """When the app installs vLLM's global exception handlers, validation
    and HTTP errors escape as ``ErrorResponse`` bodies before the route
    handler runs. The middleware installed by ``attach_router`` must
    normalise those bodies to the ``CohereError`` shape declared on the
    endpoint's OpenAPI ``responses`` map so schema-conformance tests
    (``test_openai_schema.py``) don't see a mismatch on ``/cohere/*``
    responses.
    """

    def test_validation_error_body_is_cohere_shaped(self):
        # ``model=""`` and ``messages=[]`` trip our custom field
        # validators, which raise VLLMValidationError and are routed
        # through ``vllm_error_handler`` in the real vLLM
        # server (producing the ``{"error": {...}}`` shape).
        app = _build_app_with_vllm_handlers(handler=None)
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json={"messages": [], "model": ""})
        assert r.status_code == HTTPStatus.BAD_REQUEST
        body = r.json()
        # ``CohereError`` has ``message`` at the top level, not nested
        # under an ``error`` envelope.
        assert "error" not in body
        assert "message" in body
        assert isinstance(body["message"], str) and body["message"]

    @pytest.mark.parametrize("path", ["/cohere/v2/chat", "/cohere/v2/chat/render"])
    def test_required_tool_choice_without_tools_returns_400(self, path):
        """Reject an impossible tool choice before reaching either handler."""
        app = _build_app_with_vllm_handlers(handler=None)
        with TestClient(app) as client:
            response = client.post(
                path,
                json={**_minimal_request_body(), "tool_choice": "REQUIRED"},
            )
        assert response.status_code == HTTPStatus.BAD_REQUEST
        body = response.json()
        assert "error" not in body
        assert "REQUIRED" in body["message"]
        assert "tools" in body["message"]

    def test_http_error_body_is_cohere_shaped(self):
        # A raised ``HTTPException`` from anywhere in the request cycle
        # is routed through ``http_exception_handler`` (producing the
        # ``ErrorResponse`` shape) and must be translated.
        app = _build_app_with_vllm_handlers(handler=None)

        @app.get("/cohere/v2/boom")
        async def _boom():
            raise HTTPException(status_code=418, detail="teapot")

        with TestClient(app) as client:
            r = client.get("/cohere/v2/boom")
        assert r.status_code == 418
        body = r.json()
        assert body == {"message": "teapot"}

    def test_non_cohere_path_is_not_translated(self):
        app = _build_app_with_vllm_handlers(handler=None)

        @app.get("/v1/other")
        async def _other():
            raise HTTPException(status_code=400, detail="nope")

        with TestClient(app) as client:
            r = client.get("/v1/other")
        assert r.status_code == HTTPStatus.BAD_REQUEST
        body = r.json()
        # Non-cohere paths keep the vLLM ``ErrorResponse`` shape.
        assert "error" in body
        assert body["error"]["message"] == "nope"

    def test_streaming_response_passes_through(self):
        # SSE responses have content-type text/event-stream; the
        # middleware must never buffer these (which would break
        # streaming) even though they're on ``/cohere/*``.
        async def _gen() -> AsyncGenerator[str, None]:
            yield 'data: {"type":"message-start"}\n\n'
            yield "data: [DONE]\n\n"

        app = _build_app_with_vllm_handlers(handler=_Handler(_gen()))
        with TestClient(app) as client:
            r = client.post(
                "/cohere/v2/chat",
                json={**_minimal_request_body(), "stream": True},
            )
        assert r.status_code == HTTPStatus.OK
        assert r.headers["content-type"].startswith("text/event-stream")
        assert "message-start" in r.text
        assert r.text.rstrip().endswith("[DONE]")

    def test_already_cohere_shaped_body_passes_through(self):
        # When the handler returns an ``ErrorResponse`` the route
        # itself translates it to ``CohereError``; the middleware sees
        # the ``CohereError`` shape and must leave it alone.
        err = ErrorResponse(
            error=ErrorInfo(message="already cohere", type="Bad Request", code=400)
        )
        app = _build_app_with_vllm_handlers(handler=_Handler(err))
        with TestClient(app) as client:
            r = client.post("/cohere/v2/chat", json=_minimal_request_body())
        assert r.status_code == HTTPStatus.BAD_REQUEST
        body = r.json()
        # No ``error`` wrapper: the route already emitted the wire shape.
        assert body == {"message": "already cohere"}

    def test_request_id_preserved_in_translated_body(self):
        # Client-provided ``X-Request-Id`` should be echoed as
        # ``CohereError.id`` so callers can correlate failures.
        app = _build_app_with_vllm_handlers(handler=None)
        with TestClient(app) as client:
            r = client.post(
                "/cohere/v2/chat",
                json={"messages": [], "model": ""},
                headers={"X-Request-Id": "req-abc"},
            )
        assert r.status_code == HTTPStatus.BAD_REQUEST
        body = r.json()
        assert body.get("id") == "req-abc"
