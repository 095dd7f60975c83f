"""Chat templates, which render a conversation as marked text (see ``Tokenizer.encode_marked``).

Names of chat templates that vLLM's guides give, and our own templates of the same forms (examples/templates).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import jinja2

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.operator_files import read_regular_text
from trencadis.server.text.checkpoint_tokenizer import MOST_CHARACTERS, Tokenizer
from trencadis.server.text.template_sandbox import compile_source, make_environment, render

NAMES = {
    "tool_chat_template_hermes.jinja": "qwen2_5_vl_hermes.jinja",
    "tool_chat_template_llama3_json.jinja": "llama3_json.jinja",
    "tool_chat_template_llama3.1_json.jinja": "llama3_json.jinja",
    "tool_chat_template_llama3.2_json.jinja": "llama3_json.jinja",
    "tool_chat_template_mistral.jinja": "mistral.jinja",
    "tool_chat_template_mistral3.jinja": "mistral.jinja",
    "tool_chat_template_mistral_parallel.jinja": "mistral.jinja",
    "tool_chat_template_gemma4.jinja": "gemma4.jinja",
    "template_vlm2vec.jinja": "vlm2vec.jinja",
    "template_vlm2vec_qwen2vl.jinja": "vlm2vec.jinja",
    "template_vlm2vec_phi3v.jinja": "vlm2vec_full.jinja",
}
"""File names of vLLM's examples and ours; each has the same form, and none is a copy."""


def find_template(name: str) -> Path | None:
    """The file of our own template that the path ``name`` means, by our name or by vLLM's; None: there is none.

    A file that exists is taken before; see ``chat_template.read_override``.
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    root = Path(__file__).resolve().parents[2]
    for folder in (root / "assets" / "templates", root / "examples" / "templates"):  # installed, and in a checkout
        file = folder / NAMES.get(last, last)
        if file.suffix == ".jinja" and file.is_file():
            return file
    return None


log = logging.getLogger("trencadis.server")

EMPTY = "Cannot apply chat template to an empty conversation. Provide at least one message."
BOTH = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
CALL_ID = "call00000"
"""An id that every template accepts: some require nine characters."""
PROBE = "probe of the content format"
MOST_SECONDS = 10.0
"""Seconds in which a checkpoint's template is compiled and renders what shows its form."""


class Rendering(TypedDict, total=False):
    """Options of rendering a conversation: the fields of a request apart from its messages.

    Args:
        add_generation_prompt: open the answer; the default.
        continue_final_message: leave the last message open instead.
        kwargs: variables of the template.
        chat_template: the request's own; None: the checkpoint's.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[JsonMapping] | None
    documents: Sequence[JsonMapping] | None
    kwargs: JsonMapping | None
    chat_template: str | None


class PreparedRendering(NamedTuple):
    """A rendering by another process.

    Attributes:
        source: the template, with special tokens as marks.
        values: JSON values that the template sees.
        nonce: part of every mark.
        marks: special token -> mark.
        tag: where the text is to be cut; "": nowhere.
    """

    source: str
    values: JsonObject
    nonce: str
    marks: dict[str, str]
    tag: str


class ChatTemplate:
    """A compiled template that renders special tokens as marks.

    Args:
        source: jinja2 text; ``named`` sources (such as ``tool_use``) render conversations of that kind.
        content_format: ``string``, ``openai`` or ``auto`` (detected by rendering a probe).

    Raises:
        StartupError: the source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        content_format: str = "auto",
        named: Mapping[str, str] | None = None,
    ) -> None:
        self._env = make_environment(tokenizer.nonce, tokenizer.unmark)
        self._tokenizer = tokenizer
        tokenizer.claim("\n".join([source, *(named or {}).values()]))
        self.source = source
        self._sources = (source, *(named or {}).values())
        self._default = self._compile(source)
        self._named = {name: self._compile(text) for name, text in (named or {}).items()}
        self._specials = {role: tokenizer.mark(text) for role, text in tokenizer.named.items()}
        self.text_arguments = False
        self.content_format = self._detect("user") if content_format == "auto" else content_format
        self.text_arguments = self._needs_text_arguments()
        """True if the template prints arguments of calls unchanged, so that they must be JSON text, not objects."""
        strings = set(ROLES) if self.content_format == "string" else set()
        if content_format == "auto" and self.content_format == "openai" and self._detect("tool") == "string":
            strings.add("tool")
        self.string_roles = frozenset(strings)
        """Roles whose content the template takes as a string; some templates do so only for the role of tools."""
        parts = [] if self.content_format == "string" else [r for r in ROLES if r not in strings and self._loses(r)]
        self.part_roles = frozenset(parts)
        """Roles whose content must be a list of parts: the template walks them, and would leave out a string."""

    @classmethod
    def from_checkpoint(
        cls, path: Path, tokenizer: Tokenizer, override: str = "", content_format: str = "auto"
    ) -> ChatTemplate | None:
        """Reads the template of ``--chat-template`` (a path or a text), else of the folder; None if there is none."""
        sources = {"default": read_override(override)} if override else read_sources(path)
        if not sources:
            return None
        default = sources.get("default") or next(iter(sources.values()))
        with _limit_seconds(MOST_SECONDS):
            return cls(default, tokenizer, content_format, {k: v for k, v in sources.items() if k != "default"})

    def render(self, messages: Sequence[JsonMapping], **how: Unpack[Rendering]) -> str:
        """The marked text of a conversation. Texts in ``messages`` must be scrubbed (``parse_messages`` does it).

        Raises:
            BadRequest: there is no message, the flags contradict each other, or the template refuses.
        """
        values, tag = self._make_values(messages, how)
        source = how.get("chat_template")
        template = self._default if not values["tools"] and source is None else self._pick(source)
        return cut_at(tag, render(template, values))

    def prepare(self, source: str, messages: Sequence[JsonMapping], how: Rendering) -> PreparedRendering:
        """Returns what a worker needs to render a conversation with the template ``source`` of a request.

        Raises:
            BadRequest: there is no message, or the flags contradict each other.
        """
        values, tag = self._make_values(messages, how)
        tokenizer = self._tokenizer
        return PreparedRendering(tokenizer.mark(tokenizer.scrub(source)), values, tokenizer.nonce, tokenizer.marks, tag)

    def _make_values(self, messages: Sequence[JsonMapping], how: Rendering) -> tuple[JsonObject, str]:
        """(the template's variables, a tag at whose place the text is to be cut or "").

        Raises:
            BadRequest: there is no message, or the flags contradict each other.
        """
        if not messages:
            raise BadRequest(EMPTY, param="messages")
        opens, continues = how.get("add_generation_prompt", True), how.get("continue_final_message", False)
        if continues and opens:
            raise BadRequest(BOTH, param="continue_final_message")
        values: JsonObject = {
            **self._specials,
            **{k: self.scrub(v) for k, v in (how.get("kwargs") or {}).items() if k not in RESERVED},
            "messages": [dict(m) for m in messages],
            "tools": self.scrub(list(how.get("tools") or ())) or None,
            "documents": self.scrub(list(how.get("documents") or ())) or None,
            "add_generation_prompt": opens,
        }
        tag = f"{self._tokenizer.nonce}.end" if continues else ""
        if tag:
            _append(values["messages"][-1], tag + " ")
        return values, tag

    def scrub(self, value: Json) -> Json:
        """Returns a user's JSON value without this process's nonce at any depth."""
        if isinstance(value, str):
            if len(value) > MOST_CHARACTERS:
                raise BadRequest(f"A text of the request exceeds {MOST_CHARACTERS} characters.", param="messages")
            return self._tokenizer.scrub(value)
        if isinstance(value, Mapping):
            return {self.scrub(k): self.scrub(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.scrub(v) for v in value]
        return value

    @property
    def text(self) -> str:
        """The texts of all its sources, joined."""
        return "\n".join(self._sources)

    def mentions(self, word: str) -> bool:
        """Returns True if the template's text contains ``word``, such as the name of a role or variable."""
        return any(word in source for source in self._sources)

    def has_all_specials_marked(self) -> bool:
        """Returns True if all special tokens of a rendered probe are marks, that is, none is composed while
        rendering.
        """
        roles = ("user", "assistant", "user")
        try:
            text = self.render([{"role": role, "content": "a"} for role in roles])
        except BadRequest:
            return True
        tokenizer = self._tokenizer
        return tokenizer.encode_marked(text) == tokenizer.encode(tokenizer.unmark(text))

    def _pick(self, source: str | None) -> jinja2.Template:
        """Compiles the template ``source`` of a request; None: returns the one for conversations with tools."""
        if source is None:
            return self._named.get("tool_use", self._default)
        try:
            return self._compile(self._tokenizer.scrub(source))
        except StartupError as error:
            raise BadRequest(str(error), param="chat_template") from None

    def _compile(self, source: str) -> jinja2.Template:
        return compile_source(self._env, self._tokenizer.mark(source))

    def _needs_text_arguments(self) -> bool:
        """Returns True if a call whose arguments are an object fails or is printed as Python, and one with a text is
        not.
        """
        given, shown = {PROBE: 1}, f'{{"{PROBE}": 1}}'
        try:
            if str(given) not in self.render(_make_call_conversation(given)):
                return False
        except BadRequest:
            pass
        try:
            return shown in self.render(_make_call_conversation(shown))
        except BadRequest:
            return False

    def _detect(self, role: str) -> str:
        """Returns ``openai`` if the template iterates over the parts of a message of ``role``, else ``string``."""
        text = self._render_probe(role, [{"type": "text", "text": PROBE}])
        walked = PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text
        return "openai" if walked else "string"

    def _loses(self, role: str) -> bool:
        """Returns True if the template prints a text of ``role`` in a list of parts, and not as a string."""
        parts: list[Json] = [{"type": "text", "text": PROBE}]
        return PROBE not in self._render_probe(role, PROBE) and PROBE in self._render_probe(role, parts)

    def _render_probe(self, role: str, content: str | list[Json]) -> str:
        """Renders a conversation with a message of ``role``; "": the template refuses it."""
        chat: list[JsonObject] = [{"role": role, "content": content}]
        others: list[Json] = [{"type": "text", "text": "a"}]
        if role in ("tool", "function"):
            called = _make_call_conversation("{}" if self.text_arguments else {})
            chat = [*called, chat[0] | {"tool_call_id": CALL_ID, "name": "f"}]
        elif role == "assistant":
            chat.insert(0, {"role": "user", "content": others})
        elif role != "user":
            chat.append({"role": "user", "content": others})
        try:
            return self.render(chat)
        except BadRequest:
            return ""


@contextmanager
def _limit_seconds(seconds: float) -> Iterator[None]:
    """Ends what runs inside with a StartupError once it takes too long; in the main thread alone, as signals work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise StartupError(f"The chat template takes longer than {seconds:.0f} s for a conversation of one word.")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _make_call_conversation(arguments: str | JsonObject) -> list[JsonObject]:
    """Makes a conversation that ends with a call."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def read_sources(path: Path) -> dict[str, str]:
    """Reads templates by name: chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    plain = path / "chat_template.jinja"
    if plain.is_file():
        more = sorted((path / "additional_chat_templates").glob("*.jinja"))
        return {"default": _text(plain)} | {p.stem: _text(p) for p in more}
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = (read_json(path / name) or {}).get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            try:
                return {str(v["name"]): str(v["template"]) for v in value}
            except (KeyError, TypeError):
                raise StartupError(f"{path / name}: chat_template is not a list of names and templates") from None
    return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {str(error)[:120]}") from None


def read_override(value: str) -> str:
    """Reads the text of ``--chat-template``: of the file of that name, or the value itself if it looks like a
    template.
    """
    if not any(mark in value for mark in ("{{", "{%", "\n")):
        try:
            path = Path(value)
            if not path.exists() and (ours := find_template(value)) is not None:
                log.info("--chat-template %s: taking our own template of this form, %s", value[:80], ours)
                path = ours
            return read_regular_text(path)
        except FileNotFoundError:
            why = "no such file, and no template text"
        except (OSError, ValueError) as error:
            why = f"{getattr(error, 'strerror', None) or str(error)[:120]}; it is no template text either"
        raise StartupError(f"--chat-template {value[:80]}: {why}")
    return value


def _append(message: JsonObject, tag: str) -> None:
    """Adds ``tag`` to the last text of a message."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + tag
        return
    if isinstance(content, list):
        parts = [dict(p) if isinstance(p, Mapping) else p for p in content]
        for part in reversed(parts):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += tag
                message["content"] = parts
                return
    raise BadRequest("continue_final_message needs a final message with text.", param="continue_final_message")


def cut_at(tag: str, text: str) -> str:
    """``text`` up to ``tag``, which stands at the end of a last message that is left open; "": all of it.

    Raises:
        BadRequest: the template drops that message.
    """
    if not tag:
        return text
    end = text.rfind(tag)
    if end < 0:
        raise BadRequest("The chat template drops the final message's text.", param="continue_final_message")
    # If the blank after the tag is gone, the template trims texts, so this one is trimmed as well.
    kept = text.startswith(" ", end + len(tag))
    return text[:end] if kept else text[:end].rstrip()
