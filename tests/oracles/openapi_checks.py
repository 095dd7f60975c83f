"""Holds every answer that a test gets against what ``/openapi.json`` says about its route."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import httpx
from fastapi import FastAPI

_SPECS: dict[frozenset[str], dict[str, Any]] = {}


def spec_of(app: FastAPI) -> dict[str, Any]:
    """The description; made once a session for servers that generate and for those that pool."""
    # Newer FastAPI keeps a router that is included as one route.
    inner = [r for r in app.routes for r in getattr(getattr(r, "original_router", None), "routes", [r])]
    routes = frozenset(str(getattr(r, "path", "")) for r in inner if getattr(r, "include_in_schema", False))
    if routes not in _SPECS:
        _SPECS[routes] = app.openapi()
    return _SPECS[routes]


@cache
def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", ".+", path))


def operation(spec: dict[str, Any], method: str, path: str) -> dict[str, Any] | None:
    """The description of a route; None for paths and methods that have none (docs, 404, 405)."""
    for known, methods in spec["paths"].items():
        if _pattern(known).fullmatch(path):
            found: dict[str, Any] | None = methods.get(method.lower())
            return found
    return None


def check_declared(app: FastAPI, response: httpx.Response) -> None:
    """Asserts that the status is listed, with this content type, and that a JSON body has the listed fields."""
    spec, request = spec_of(app), response.request
    found = operation(spec, request.method, request.url.path)
    if found is None:
        return
    status = str(response.status_code)
    assert status in found["responses"], f"{request.method} {request.url.path} answered {status}: {response.text[:300]}"
    kinds = found["responses"][status].get("content", {})
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in kinds, f"{request.method} {request.url.path} {status} answered {kind}, not {list(kinds)}"
    if kind == "application/json":
        _check(spec, kinds[kind]["schema"], response.json(), request.url.path)


def _check(spec: dict[str, Any], schema: dict[str, Any], value: Any, where: str) -> None:
    """The fields that must be there and those that may, as deep as the description goes."""
    if "$ref" in schema:
        schema = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        some = [s for s in schema["anyOf"] if (s.get("type") == "null") == (value is None)]
        assert some, where
        return _check(spec, some[0], value, where) if len(some) == 1 else None
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool}
    if "type" in schema and schema["type"] != "null":
        assert isinstance(value, kinds[schema["type"]]), (where, schema["type"], value)
    if "properties" in schema:
        assert set(schema.get("required", ())) <= set(value) <= set(schema["properties"]), (where, sorted(value))
        for name, one in value.items():
            _check(spec, schema["properties"][name], one, f"{where}.{name}")
    for one in value[:3] if isinstance(value, list) and "items" in schema else ():
        _check(spec, schema["items"], one, f"{where}[]")
    return None
