"""What the HTTP side needs to know; made from the server's configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trencadis import __version__
from trencadis.server.admission import Bounds

if TYPE_CHECKING:
    from trencadis.server.config.config import ServerConfig


@dataclass(frozen=True)
class HttpSettings:
    """Frozen values with the names and meaning of the flags."""

    served_model_name: tuple[str, ...] = ("model",)
    model_root: str = ""
    device: str = ""
    api_key: tuple[str, ...] = ()
    metrics_auth: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    disable_fastapi_docs: bool = False
    max_body_bytes: int = 64 << 20
    receive_timeout: float = 20.0
    bounds: Bounds = field(default_factory=Bounds)
    response_role: str = "assistant"
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    strict_request_fields: bool = False
    priorities: bool = False
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    sse_keep_alive_interval: float = 0.0
    disable_log_stats: bool = False
    enable_log_requests: bool = False

    @classmethod
    def of(
        cls, config: ServerConfig, model: str, device: str = "", running: int = 0, priorities: bool = False
    ) -> HttpSettings:
        """The HTTP side's part of ``config``.

        Args:
            model: as the user gave it; its name where none was chosen.
            running: requests that run at a time, which a bound of the queue does not count.
            priorities: whether the scheduler heeds them.
        """
        base = Bounds()
        waiting = config.max_num_queued_reqs
        return cls(
            served_model_name=tuple(config.served_model_name) or (model,),
            model_root=model,
            device=device,
            api_key=tuple(config.api_key),
            metrics_auth=config.metrics_auth,
            allowed_origins=tuple(config.allowed_origins),
            allowed_methods=tuple(config.allowed_methods),
            allowed_headers=tuple(config.allowed_headers),
            allow_credentials=config.allow_credentials,
            root_path=config.root_path,
            disable_fastapi_docs=config.disable_fastapi_docs,
            max_body_bytes=config.max_body_bytes,
            receive_timeout=config.receive_timeout,
            bounds=Bounds(
                base.requests if waiting is None else waiting + running,
                config.max_num_queued_tokens or base.tokens,
                config.max_num_queued_pixels or base.pixels,
                config.max_queued_body_bytes,
            ),
            response_role=config.response_role,
            default_chat_template_kwargs=dict(config.default_chat_template_kwargs),
            trust_request_chat_template=config.trust_request_chat_template,
            strict_request_fields=config.strict_request_fields,
            priorities=priorities,
            return_tokens_as_token_ids=config.return_tokens_as_token_ids,
            enable_force_include_usage=config.enable_force_include_usage,
            sse_keep_alive_interval=config.sse_keep_alive_interval,
            disable_log_stats=config.disable_log_stats,
            enable_log_requests=config.enable_log_requests,
        )

    @property
    def name(self) -> str:
        """The first served name, which metrics and answers carry."""
        return self.served_model_name[0]

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: the version and a digest of what is served."""
        what = "|".join((__version__, *self.served_model_name, self.model_root))
        return f"trencadis-{__version__}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
