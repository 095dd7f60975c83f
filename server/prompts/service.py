"""Turns parsed requests into engine requests, for the routes and the offline ``LLM``; no web framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import BadRequest
from trencadis.core.models.registry import family_of
from trencadis.core.request import SamplingParams
from trencadis.multimodal.options import NO_SCOPE, MediaPart, MediaScope
from trencadis.multimodal.placeholders import Numbered
from trencadis.multimodal.stages import record_media_times
from trencadis.server.prompts import params
from trencadis.server.prompts.chat import PAIR_ROLES, MessageRules, parse
from trencadis.server.prompts.generation_config import Defaults
from trencadis.server.prompts.media import (
    ImageSource,
    Joiner,
    PlaceholderJoiner,
    VideoSource,
    arranged,
    check_tokens,
    placed,
    prepared,
)
from trencadis.server.prompts.output import ChoiceStream
from trencadis.server.prompts.params import RequestLimits
from trencadis.server.prompts.prompt import Prompt
from trencadis.server.protocol.json_values import check_json
from trencadis.server.text.cutting import cut_text, pair_of
from trencadis.server.text.detokenizer import detokenizers
from trencadis.server.text.encoding import COUNTED, LONGEST_TOKEN, most_characters
from trencadis.server.text.off_loop import Check, OffLoop, no_check, small
from trencadis.server.text.template import ROLES, ChatTemplate, Rendering
from trencadis.server.text.tokenizer import Tokenizer

log = logging.getLogger("trencadis.server")
T = TypeVar("T")
KINDS = ("image", "video")
_OFF_LOOP = OffLoop("text")
DEFAULT_MEDIA = 999
"""Most media of each kind in a prompt, unless ``--limit-mm-per-prompt`` says otherwise."""
COUNTED_TOKENS = 1 << 18
"""Most tokens of a prompt that is only counted, unless twice the context are more."""


class TextService:
    """Prompts, parameters and output streams of one model.

    Args:
        config: the checkpoint's.
        template: None if the checkpoint has no chat template; chat requests then fail.
        images: where prepared images come from; None where the model takes none.
        videos: likewise.
        join: puts media into a prompt (default: the family's way).
        max_model_len: until the engine is up and reports its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: Defaults | None = None,
        limits: RequestLimits | None = None,
        images: ImageSource | None = None,
        join: Joiner | None = None,
        videos: VideoSource | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._detokenizers = detokenizers(tokenizer)
        self.defaults = defaults or Defaults()
        self.limits = limits or RequestLimits(vocab=config.text.vocab)
        self.images = images
        self.videos = videos
        self._join = join or PlaceholderJoiner(config, self._beside_pictures)
        self.max_model_len = max_model_len or config.text.max_positions
        self.room = int(config.pooling is None)  # tokens that a prompt leaves to its answer
        self.template = template
        self.eos = frozenset(config.eos or (() if tokenizer.eos is None else (tokenizer.eos,)))
        side = family_of(config.architecture).vision
        self._around = side.around if side is not None and any(side.around) else None
        self._marks = Numbered(*side.numbered) if side is not None and any(side.numbered) else None

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if there is none."""
        return self._template

    @template.setter
    def template(self, template: ChatTemplate | None) -> None:
        self._template = template
        self._messages = None if template is None else self._rules(template)

    @property
    def counted(self) -> int:
        """Most tokens of a prompt that is counted and not run; a client asks how much must go."""
        return max(2 * self.max_model_len, COUNTED_TOKENS)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        engine: EngineConfig,
        *,
        images: ImageSource | None = None,
        videos: VideoSource | None = None,
        chat_template: str = "",
        content_format: str = "auto",
        max_choices: int = 128,
    ) -> TextService:
        """Reads tokenizer, template and defaults as ``engine`` says, from the checkpoint that ``config`` came from."""
        tokenizer = Tokenizer.from_checkpoint(Path(engine.tokenizer) if engine.tokenizer else config.path)
        most = [0 if config.vision is None else engine.limit_mm_per_prompt.get(k, DEFAULT_MEDIA) for k in KINDS]
        check_tokens(config, tokenizer.token_id)
        limits = RequestLimits(config.text.vocab, engine.max_logprobs, max_choices, *most)
        defaults = Defaults.read(config.path, engine.generation_config or "auto", engine.override_generation_config)
        template = ChatTemplate.from_checkpoint(config.path, tokenizer, chat_template, content_format)
        made = cls(config, tokenizer, template, defaults, limits, images, None, videos, engine.max_model_len)
        tokenizer.warm()
        log.info("sampling defaults: %s", defaults)
        if template is not None and not template.keeps_specials():
            log.warning("the chat template composes special tokens from parts; the tokenizer reads these as plain text")
        return made

    async def chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        truncate: int | None = None,
        truncation_side: str = "left",
        scope: MediaScope = NO_SCOPE,
        told: bool = True,
        most: int = 0,
        **how: Unpack[Rendering],
    ) -> Prompt:
        """Renders and encodes a conversation and puts its media into the prompt.

        Args:
            told: whether the prompt has its text beside its ids.
            most: tokens of a prompt that is counted and not run; 0: it runs, and the context has room for it.

        Raises:
            BadRequest: a message, a medium or the length is wrong.
        """
        template, rules = self._template, self._messages
        if template is None or rules is None:
            raise BadRequest("This model has no chat template; give one with --chat-template.", param="messages")

        def read(check: Check) -> tuple[Sequence[MediaPart], list[int], str | None]:
            talk = parse(messages, rules)
            check()
            text = template.render(talk.messages, **how)
            check()
            text = self._with_room(text, marked=True) if self._around else text
            whole = self.tokenizer.unmark(text) if told else None
            if talk.media and self._marks is not None:
                return talk.media, self._apart(text, check, most, marked=True), whole
            cut = truncate is not None and truncation_side != "right" and not talk.media
            return talk.media, self._encode(text, check, most, marked=True, cut=cut), whole

        media, tokens, text = await _run(read, messages, *how.values())
        if media:
            return self._whole(await self._joined(tokens, media, scope, text, most), truncate)
        if truncate is not None:
            tokens = self._truncated(tokens, truncate, truncation_side)
        self._fits(len(tokens), most)
        return Prompt(tokens, text, salt=scope.salt)

    async def raw_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        truncation_side: str = "",
        most: int = 0,
    ) -> Prompt:
        """A prompt without a template; special tokens in its text count as tokens. ``most``: as ``chat_prompt``.

        Raises:
            BadRequest: the prompt is empty or too long, or has ids outside the vocabulary or of media.
        """
        (made,) = await self.raw_prompts(
            [prompt], add_special_tokens=add_special_tokens, truncate=truncate, truncation_side=truncation_side,
            most=most,
        )  # fmt: skip
        return made

    async def raw_prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        truncation_side: str = "",
        most: int = 0,
    ) -> list[Prompt]:
        """Several prompts as ``raw_prompt`` reads them; off the event loop if they are long together.

        ``truncation_side`` "": encoders lose their end, which is ``right``, and decoders their beginning.

        Raises:
            BadRequest: as ``raw_prompt``.
        """

        how = add_special_tokens, truncate, truncation_side, most
        return await _run(lambda check: [self._raw(p, check, *how) for p in prompts], prompts)

    def _raw(
        self, prompt: str | Sequence[int], check: Check, special: bool, truncate: int | None, side: str, most: int
    ) -> Prompt:
        check()
        side = side or ("left" if self.config.text.causal else "right")
        if isinstance(prompt, str) and truncate is not None and special and not self.config.text.causal:
            check_json(prompt, "prompt")
            tokens = cut_text(self.tokenizer, prompt, self._most(truncate), side)
        elif isinstance(prompt, str):
            # For a text that is too long only its end is encoded, which suffices only if truncation keeps the end.
            cut = truncate is not None and side == "left"
            tokens = self._encode(prompt, check, most, add_special_tokens=special, cut=cut)
        else:
            tokens = list(prompt)
            bad = next((t for t in tokens if not 0 <= t < self.config.text.vocab), None)
            if bad is not None:
                raise BadRequest(f"Token id {bad} is out of vocabulary.", param="prompt")
        if not tokens and not most:
            raise BadRequest("The prompt is empty.", param="prompt")
        media = {t for t in (self.config.placed, self.config.video_token) if t >= 0}
        if media.intersection(tokens) and not most:
            raise BadRequest("The prompt holds image tokens without an image; use chat completions.", param="prompt")
        kept = tokens if truncate is None else self._truncated(tokens, truncate, side)
        self._fits(len(kept), most)
        text = prompt if isinstance(prompt, str) and len(kept) == len(tokens) else None
        return Prompt(kept, text, None if self.config.text.causal else placed(self.config.text, kept))

    async def text_pair(self, query: str, document: str, truncate: int | None = None, side: str = "right") -> Prompt:
        """Two texts as an encoder's checkpoint joins them.

        Raises:
            BadRequest: they are too long together.
        """

        def read(check: Check) -> Prompt:
            for text in (query, document):
                check_json(text, "prompt")
            most = None if truncate is None else self._most(truncate)
            if most is None and len(query) + len(document) > most_characters(self.max_model_len):
                params.too_long(len(query) + len(document), self.max_model_len)
            made = pair_of(self.tokenizer, query, document, most, side)
            params.too_long(len(made.tokens), self.max_model_len, self.room)
            return Prompt(made.tokens, None, placed(self.config.text, *made))

        return await _run(read, query, document)

    async def media_prompt(
        self, prompt: str | Sequence[int], parts: Sequence[MediaPart], scope: MediaScope = NO_SCOPE
    ) -> Prompt:
        """A raw prompt with one image or video token per part, which an offline caller has written.

        Raises:
            BadRequest: the number of tokens does not match, or an image, a video or the length is wrong.
        """
        if not isinstance(prompt, str):
            return await self._joined(list(prompt), parts, scope, None)
        if self._marks is not None:
            text, parts = self._marks.placed(prompt, parts, self.tokenizer.token(self.config.placed) or "")
            tokens = await _run(lambda check: self._apart(text, check, marked=False), prompt)
            return await self._joined(tokens, parts, scope, prompt)
        text = self._with_room(prompt, marked=False) if self._around else prompt
        tokens = await _run(lambda check: self._encode(text, check, add_special_tokens=True), prompt)
        return await self._joined(tokens, parts, scope, prompt)

    async def _joined(
        self, tokens: list[int], parts: Sequence[MediaPart], scope: MediaScope, text: str | None, most: int = 0
    ) -> Prompt:
        """Prepares all media concurrently and puts them into the prompt."""
        self._fits(len(tokens), most)
        with record_media_times() as times:
            if self.images is None or any(p.kind == "video" for p in parts):
                room = self.max_model_len - len(tokens)
                media = await prepared(parts, self.images, self.videos, room, scope)
                made = arranged(tokens, self.config.placed, self.config.video_token, media)
            else:
                made = [*await self.images.prepare(parts, scope)]
        expanded = self._join(tokens, made)
        self._fits(len(expanded.tokens), most)
        return Prompt(expanded.tokens, text, expanded, made, scope.salt, times)

    def stream(self, sampling: SamplingParams, prompt: Prompt) -> ChoiceStream:
        """The output side of one choice."""
        reader = None if prompt.reader is None else prompt.reader()
        written = self._detokenizers(prompt.tokens, sampling.skip_special_tokens, prompt.shown)
        return ChoiceStream(written, sampling, self.eos, reader)

    def _rules(self, template: ChatTemplate) -> MessageRules:
        """How messages are read for ``template``."""
        kinds = {"image": self.config.placed, "video": self.config.video_token}
        roles = {role: role for role in (*ROLES, *(PAIR_ROLES if self.config.pooling is not None else ()))}
        if not template.mentions("developer"):
            roles["developer"] = "system"
        return MessageRules(
            scrub=template.scrub,
            roles=roles,
            placeholders={kind: self._placeholder(token) for kind, token in kinds.items() if token >= 0},
            as_string=template.string_roles,
            text_arguments=template.text_arguments,
            most={"image": self.limits.max_images, "video": self.limits.max_videos},
        )

    def _beside_pictures(self, text: str) -> list[int]:
        """The ids of a text behind a placeholder token: tokenizers read the start of a prompt differently."""
        ids = self.tokenizer.encode((self.tokenizer.token(self.config.placed) or "") + text)
        return ids[ids.index(self.config.placed) + 1 :]

    def _with_room(self, text: str, marked: bool) -> str:
        """``text`` with what the family puts around a picture's mark."""
        before, behind = self._around or ("", "")
        name = self.tokenizer.token(self.config.placed) or ""
        mark = self.tokenizer.mark(name) if marked else name
        return text.replace(mark, f"{before}{mark}{behind}") if mark else text

    def _apart(self, text: str, check: Check, most: int = 0, *, marked: bool) -> list[int]:
        """The ids of a text whose parts between pictures are prompts of their own."""
        name = self.tokenizer.token(self.config.placed) or ""
        begin, end = self.tokenizer.framing if marked else ([], [])
        tokens: list[int] = []
        for i, part in enumerate(text.split(self.tokenizer.mark(name) if marked else name)):
            tokens += [self.config.placed] * (i > 0)
            tokens += [*begin, *self._encode(part, check, most, marked=marked, add_special_tokens=True), *end]
        return tokens

    def _placeholder(self, token: int) -> str:
        """Marked text of a medium, between the vision marks if the checkpoint has them."""
        name = self.tokenizer.token(token) or ""
        around = [self.tokenizer.token(t) or "" for t in (self.config.vision_start, self.config.vision_end) if t >= 0]
        return self.tokenizer.mark(name.join(around) if len(around) == 2 else name)

    def _encode(
        self, text: str, check: Check, most: int = 0, *,
        marked: bool = False, add_special_tokens: bool = False, cut: bool = False,
    ) -> list[int]:  # fmt: skip
        """The ids of a text; ``cut``: of its end at least, since the caller keeps no more than that.

        Raises:
            BadRequest: the text is far too long.
        """
        if len(text) > most_characters(max(self.max_model_len, most)):
            params.too_long(max(len(text) // LONGEST_TOKEN, self.max_model_len), self.max_model_len)
        check_json(text, "messages" if marked else "prompt")
        if len(text) > COUNTED:
            text = self._counted(text, check, max(2 * self.max_model_len, most), marked, cut)
        tokenizer = self.tokenizer
        return tokenizer.encode_marked(text) if marked else tokenizer.encode(text, True, add_special_tokens)

    def _counted(self, text: str, check: Check, most: int, marked: bool, truncated: bool) -> str:
        """A long text, or that of its end which may be kept where it is ``truncated``.

        Raises:
            BadRequest: it has far too many tokens.
        """
        end, count = self.tokenizer.kept(text, most, check, marked)
        if not truncated and len(end) < len(text):
            params.too_long(count, self.max_model_len)
        check()
        return end

    def _fits(self, tokens: int, most: int) -> None:
        """Raises BadRequest for a prompt of more than ``most`` tokens; 0: one that leaves no room to its answer."""
        if tokens > most:
            params.too_long(tokens, self.max_model_len, self.room)

    def _whole(self, prompt: Prompt, limit: int | None) -> Prompt:
        """A prompt with media, which no ``truncate_prompt_tokens`` may cut."""
        if limit is not None and len(self._truncated(prompt.tokens, limit, "left")) < len(prompt.tokens):
            raise BadRequest("A prompt with images or videos cannot be truncated.", param="truncate_prompt_tokens")
        return prompt

    def _truncated(self, tokens: list[int], limit: int, side: str) -> list[int]:
        most = self._most(limit)
        return tokens[:most] if side == "right" else tokens[-most:]

    def _most(self, limit: int) -> int:
        """Tokens that ``truncate_prompt_tokens`` keeps."""
        if limit < -1 or limit == 0:
            raise BadRequest("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        return self.max_model_len - self.room if limit == -1 else limit


async def _run(work: Callable[[Check], T], *values: Any) -> T:
    """Runs ``work``: here if a request's ``values`` are small, else off the event loop."""
    return work(no_check) if small(*values) else await _OFF_LOOP.run(work)
