"""Keeps the names of a request's unknown fields, but not their values."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

EMPTY: tuple[Any, ...] = (None, False, [], {})
"""Values of a field that a client does not use."""


class NamesOnly(BaseModel):
    """Base of requests. The value of an unknown field is True (or empty): values would live as long as the answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_values(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v if k in cls.model_fields or v in EMPTY else True for k, v in data.items()}
