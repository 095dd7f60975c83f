"""Fields that a request has and its model does not know: their names are kept, their values are not."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

EMPTY: tuple[Any, ...] = (None, False, [], {})
"""Values by which a client says that it does not use a field."""


class NamesOnly(BaseModel):
    """Base of requests. An unknown field is True, unless it is empty: its value would live as long as the answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_values(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v if k in cls.model_fields or v in EMPTY else True for k, v in data.items()}
