"""Turns parsed requests into engine requests, for the routes and the offline ``LLM``; no web framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest
from trencadis.core.request import SamplingParams
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_SCOPE, MediaPart, MediaScope
from trencadis.multimodal.media_timing_and_concurrency import record_media_times
from trencadis.multimodal.placeholders import NumberedPlaceholders
from trencadis.server.prompts import sampling_params
from trencadis.server.prompts.multimodal_inputs import (
    ImageSource,
    MediaJoiner,
    PlaceholderJoiner,
    VideoSource,
    arrange_media,
    check_tokens,
    make_token_positions,
    prepare_media,
)
from trencadis.server.prompts.output_processor import ChoiceStream, make_detokenizers
from trencadis.server.prompts.prompt_and_chat_messages import (
    PAIR_ROLES,
    Conversation,
    MessageRules,
    Prompt,
    parse_messages,
)
from trencadis.server.prompts.sampling_params import RequestLimits, SamplingDefaults
from trencadis.server.protocol.json_body_limits import check_json
from trencadis.server.text.chat_template import ROLES, ChatTemplate, Rendering
from trencadis.server.text.checkpoint_tokenizer import COUNTED, LONGEST_TOKEN, Tokenizer, get_max_characters
from trencadis.server.text.off_event_loop import Check, OffEventLoop, TemplateWorkers, is_small, no_check
from trencadis.server.text.truncation import cut_text, encode_pair

log = logging.getLogger("trencadis.server")
T = TypeVar("T")
KINDS = ("image", "video")
_OFF_LOOP = OffEventLoop("text")
DEFAULT_MEDIA = 999
"""Most media of each kind in a prompt, unless ``--limit-mm-per-prompt`` sets another limit."""
COUNTED_TOKENS = 1 << 18
"""Most tokens of a prompt that is only counted, unless twice the context is more."""


class _ReadChat(NamedTuple):
    """The media of a conversation, and its tokens; ``text`` as well where the prompt keeps it."""

    media: Sequence[MediaPart]
    tokens: list[int]
    text: str | None


class TextService:
    """Prompts, parameters and output streams of one model.

    Args:
        config: the checkpoint's configuration.
        template: None if the checkpoint has no chat template; chat requests then fail.
        images: prepares images; None if the model takes none.
        videos: prepares videos; None if the model takes none.
        join: expands media placeholders (default: by the rules of the model family).
        max_model_len: the context until the engine is up and reports its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults | None = None,
        limits: RequestLimits | None = None,
        images: ImageSource | None = None,
        join: MediaJoiner | None = None,
        videos: VideoSource | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._detokenizers = make_detokenizers(tokenizer)
        self.defaults = defaults or SamplingDefaults()
        self.limits = limits or RequestLimits(vocab=config.text.vocab)
        self.images = images
        self.videos = videos
        self._join = join or PlaceholderJoiner(config, self._encode_after_placeholder)
        self.max_model_len = max_model_len or config.text.max_positions
        self.min_output_tokens = int(config.pooling is None)  # tokens that a prompt leaves to its answer
        self.template = template
        self.template_workers: TemplateWorkers | None = None
        """Where a server renders templates of requests; None: here, as a library's caller trusts its own."""
        self.eos = frozenset(config.eos or (() if tokenizer.eos is None else (tokenizer.eos,)))
        side = family_of(config.architecture).vision
        self._around = side.around if side is not None and any(side.around) else None
        self._marks = NumberedPlaceholders(*side.numbered) if side is not None and any(side.numbered) else None

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if there is none."""
        return self._template

    @template.setter
    def template(self, template: ChatTemplate | None) -> None:
        self._template = template
        self._messages = None if template is None else self._make_message_rules(template)

    @property
    def max_counted_tokens(self) -> int:
        """Most tokens of a prompt that is counted and not run; above the context, so that clients learn how much to
        remove.
        """
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
        """Reads tokenizer, template and defaults according to ``engine``, from the checkpoint that ``config`` came
        from.
        """
        tokenizer = Tokenizer.from_checkpoint(Path(engine.tokenizer) if engine.tokenizer else config.path)
        most = [0 if config.vision is None else engine.limit_mm_per_prompt.get(k, DEFAULT_MEDIA) for k in KINDS]
        check_tokens(config, tokenizer.find_token_id)
        limits = RequestLimits(config.text.vocab, engine.max_logprobs, max_choices, *most)
        defaults = SamplingDefaults.read(
            config.path, engine.generation_config or "auto", engine.override_generation_config
        )
        template = ChatTemplate.from_checkpoint(config.path, tokenizer, chat_template, content_format)
        made = cls(config, tokenizer, template, defaults, limits, images, None, videos, engine.max_model_len)
        tokenizer.warm()
        log.info("sampling defaults: %s", defaults)
        if template is not None and not template.has_all_specials_marked():
            log.warning("the chat template composes special tokens from parts; the tokenizer reads these as plain text")
        return made

    async def make_chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        truncate: int | None = None,
        truncation_side: str = "left",
        scope: MediaScope = NO_SCOPE,
        keep_text: bool = True,
        most: int = 0,
        **how: Unpack[Rendering],
    ) -> Prompt:
        """Renders and encodes a conversation and puts its media into the prompt.

        Args:
            keep_text: whether the prompt has its text beside its ids.
            most: tokens of a prompt that is counted and not run; 0: it runs, and the context has room for it.

        Raises:
            BadRequest: a message, a medium or the length is wrong.
        """
        template, rules = self._template, self._messages
        if template is None or rules is None:
            raise BadRequest("This model has no chat template; give one with --chat-template.", param="messages")

        rendered = await self._render_own_template(template, rules, messages, how)

        def read(check: Check) -> _ReadChat:
            if rendered is not None:
                conversation, text = rendered
            else:
                conversation = parse_messages(messages, rules)
                check()
                text = template.render(conversation.messages, **how)
            check()
            text = self._add_image_padding(text, marked=True) if self._around else text
            whole = self.tokenizer.unmark(text) if keep_text else None
            if conversation.media and self._marks is not None:
                tokens = self._encode_between_images(text, check, most, marked=True)
                return _ReadChat(conversation.media, tokens, whole)
            cut = truncate is not None and truncation_side != "right" and not conversation.media
            return _ReadChat(conversation.media, self._encode(text, check, most, marked=True, cut=cut), whole)

        media, tokens, text = await _run_maybe_off_loop(read, messages, *how.values())
        if media:
            return self._check_not_truncated(await self._join_media(tokens, media, scope, text, most), truncate)
        if truncate is not None:
            tokens = self._truncate_tokens(tokens, truncate, truncation_side)
        self._check_length(len(tokens), most)
        return Prompt(tokens, text, salt=scope.salt)

    async def _render_own_template(
        self, template: ChatTemplate, rules: MessageRules, messages: Sequence[Any], how: Rendering
    ) -> tuple[Conversation, str] | None:
        """The conversation and its marked text, where the request has a template and a server renders it; else None."""
        source = how.get("chat_template")
        if source is None or self.template_workers is None:
            return None
        conversation = await _run_maybe_off_loop(lambda check: parse_messages(messages, rules), messages)
        return conversation, await self.template_workers.render(template.prepare(source, conversation.messages, how))

    async def make_raw_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        truncation_side: str = "",
        most: int = 0,
    ) -> Prompt:
        """Makes a prompt without a template; special tokens in its text count as tokens. ``most``: see
        ``make_chat_prompt``.

        Raises:
            BadRequest: the prompt is empty or too long, or has ids outside the vocabulary or of media.
        """
        (made,) = await self.make_raw_prompts(
            [prompt], add_special_tokens=add_special_tokens, truncate=truncate, truncation_side=truncation_side,
            most=most,
        )  # fmt: skip
        return made

    async def make_raw_prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        truncation_side: str = "",
        most: int = 0,
        longest: int = 0,
    ) -> list[Prompt]:
        """Several prompts as ``make_raw_prompt`` reads them; off the event loop if they are long together.

        ``truncation_side`` "": encoders lose their end, which is ``right``, and decoders their beginning. ``longest``:
        most tokens of a prompt that the caller divides; 0: the context.

        Raises:
            BadRequest: as ``make_raw_prompt``.
        """

        how = add_special_tokens, truncate, truncation_side, most, longest
        return await _run_maybe_off_loop(
            lambda check: [self._make_raw_prompt(p, check, *how) for p in prompts], prompts
        )

    def _make_raw_prompt(
        self, prompt: str | Sequence[int], check: Check, special: bool, truncate: int | None, side: str, most: int,
        longest: int,
    ) -> Prompt:  # fmt: skip
        check()
        side = side or ("left" if self.config.text.causal else "right")
        if isinstance(prompt, str) and truncate is not None and special and not self.config.text.causal:
            check_json(prompt, "prompt")
            tokens = cut_text(self.tokenizer, prompt, self._get_truncation(truncate), side)
        elif isinstance(prompt, str):
            # For a text that is too long only its end is encoded, which suffices only if truncation keeps the end.
            cut = truncate is not None and side == "left"
            tokens = self._encode(prompt, check, max(most, longest), add_special_tokens=special, cut=cut)
        else:
            tokens = list(prompt)
            bad = next((t for t in tokens if not 0 <= t < self.config.text.vocab), None)
            if bad is not None:
                raise BadRequest(f"Token id {bad} is out of vocabulary.", param="prompt")
        if not tokens and not most:
            raise BadRequest("The prompt is empty.", param="prompt")
        media = {t for t in (self.config.placeholder_token, self.config.video_token) if t >= 0}
        if media.intersection(tokens) and not most:
            raise BadRequest("The prompt holds image tokens without an image; use chat completions.", param="prompt")
        kept = tokens if truncate is None else self._truncate_tokens(tokens, truncate, side)
        self._check_length(len(kept), max(most, longest))
        text = prompt if isinstance(prompt, str) and len(kept) == len(tokens) else None
        return Prompt(kept, text, None if self.config.text.causal else make_token_positions(self.config.text, kept))

    async def make_pair_prompt(
        self, query: str, document: str, truncate: int | None = None, side: str = "right"
    ) -> Prompt:
        """Joins two texts in the form of an encoder's checkpoint.

        Raises:
            BadRequest: together they are too long.
        """

        def read(check: Check) -> Prompt:
            for text in (query, document):
                check_json(text, "prompt")
            most = None if truncate is None else self._get_truncation(truncate)
            if most is None and len(query) + len(document) > get_max_characters(self.max_model_len):
                sampling_params.check_prompt_length(len(query) + len(document), self.max_model_len)
            made = encode_pair(self.tokenizer, query, document, most, side)
            sampling_params.check_prompt_length(len(made.tokens), self.max_model_len, self.min_output_tokens)
            return Prompt(made.tokens, None, make_token_positions(self.config.text, *made))

        return await _run_maybe_off_loop(read, query, document)

    async def make_media_prompt(
        self, prompt: str | Sequence[int], parts: Sequence[MediaPart], scope: MediaScope = NO_SCOPE
    ) -> Prompt:
        """Makes a raw prompt in which the offline caller has written one image or video token per part.

        Raises:
            BadRequest: the number of tokens does not match, or an image, a video or the length is wrong.
        """
        if not isinstance(prompt, str):
            return await self._join_media(list(prompt), parts, scope, None)
        if self._marks is not None:
            text, parts = self._marks.replace_marks(
                prompt, parts, self.tokenizer.get_token(self.config.placeholder_token) or ""
            )
            tokens = await _run_maybe_off_loop(
                lambda check: self._encode_between_images(text, check, marked=False), prompt
            )
            return await self._join_media(tokens, parts, scope, prompt)
        text = self._add_image_padding(prompt, marked=False) if self._around else prompt
        tokens = await _run_maybe_off_loop(lambda check: self._encode(text, check, add_special_tokens=True), prompt)
        return await self._join_media(tokens, parts, scope, prompt)

    async def _join_media(
        self, tokens: list[int], parts: Sequence[MediaPart], scope: MediaScope, text: str | None, most: int = 0
    ) -> Prompt:
        """Prepares all media concurrently and puts them into the prompt."""
        self._check_length(len(tokens), most)
        with record_media_times() as times:
            if self.images is None or any(p.kind == "video" for p in parts):
                tokens_left = self.max_model_len - len(tokens)
                media = await prepare_media(parts, self.images, self.videos, tokens_left, scope)
                made = arrange_media(tokens, self.config.placeholder_token, self.config.video_token, media)
            else:
                made = [*await self.images.prepare(parts, scope)]
        expanded = self._join(tokens, made)
        self._check_length(len(expanded.tokens), most)
        return Prompt(expanded.tokens, text, expanded, made, scope.salt, times)

    def make_stream(self, sampling: SamplingParams, prompt: Prompt) -> ChoiceStream:
        """Makes the output stream of one choice."""
        reader = None if prompt.reader is None else prompt.reader()
        written = self._detokenizers(prompt.tokens, sampling.skip_special_tokens, prompt.shown)
        return ChoiceStream(written, sampling, self.eos, reader)

    def _make_message_rules(self, template: ChatTemplate) -> MessageRules:
        """Returns the rules by which messages are read for ``template``."""
        kinds = {"image": self.config.placeholder_token, "video": self.config.video_token}
        roles = {role: role for role in (*ROLES, *(PAIR_ROLES if self.config.pooling is not None else ()))}
        if not template.mentions("developer"):
            roles["developer"] = "system"
        return MessageRules(
            scrub=template.scrub,
            roles=roles,
            placeholders={kind: self._make_placeholder(token) for kind, token in kinds.items() if token >= 0},
            as_string=template.string_roles,
            as_parts=template.part_roles,
            text_arguments=template.text_arguments,
            most={"image": self.limits.max_images, "video": self.limits.max_videos},
        )

    def _encode_after_placeholder(self, text: str) -> list[int]:
        """Returns the ids of a text that follows a placeholder token: tokenizers read the start of a prompt
        differently.
        """
        ids = self.tokenizer.encode((self.tokenizer.get_token(self.config.placeholder_token) or "") + text)
        return ids[ids.index(self.config.placeholder_token) + 1 :]

    def _add_image_padding(self, text: str, marked: bool) -> str:
        """Adds the padding that the model family puts around an image's mark to ``text``."""
        before, behind = self._around or ("", "")
        name = self.tokenizer.get_token(self.config.placeholder_token) or ""
        mark = self.tokenizer.mark(name) if marked else name
        return text.replace(mark, f"{before}{mark}{behind}") if mark else text

    def _encode_between_images(self, text: str, check: Check, most: int = 0, *, marked: bool) -> list[int]:
        """Returns the token ids of a text in which each part between two images is tokenized separately."""
        name = self.tokenizer.get_token(self.config.placeholder_token) or ""
        begin, end = self.tokenizer.framing if marked else ([], [])
        tokens: list[int] = []
        for i, part in enumerate(text.split(self.tokenizer.mark(name) if marked else name)):
            tokens += [self.config.placeholder_token] * (i > 0)
            tokens += [*begin, *self._encode(part, check, most, marked=marked, add_special_tokens=True), *end]
        return tokens

    def _make_placeholder(self, token: int) -> str:
        """Returns the marked text of a medium, between the vision marks if the checkpoint has them."""
        name = self.tokenizer.get_token(token) or ""
        around = [
            self.tokenizer.get_token(t) or "" for t in (self.config.vision_start, self.config.vision_end) if t >= 0
        ]
        return self.tokenizer.mark(name.join(around) if len(around) == 2 else name)

    def _encode(
        self, text: str, check: Check, most: int = 0, *,
        marked: bool = False, add_special_tokens: bool = False, cut: bool = False,
    ) -> list[int]:  # fmt: skip
        """Returns the ids of a text; with ``cut``, possibly only those of its end, since the caller keeps no more than
        that.

        Raises:
            BadRequest: the text is far too long.
        """
        if len(text) > get_max_characters(max(self.max_model_len, most)):
            sampling_params.check_prompt_length(max(len(text) // LONGEST_TOKEN, self.max_model_len), self.max_model_len)
        check_json(text, "messages" if marked else "prompt")
        if len(text) > COUNTED:
            text = self._cut_long_text(text, check, max(2 * self.max_model_len, most), marked, cut)
        tokenizer = self.tokenizer
        return tokenizer.encode_marked(text) if marked else tokenizer.encode(text, True, add_special_tokens)

    async def encode_prediction(self, text: str) -> list[int]:
        """Returns the ids of a predicted answer, at most as many as fit into the context; special tokens are text.

        A long text is read in pieces from its start, for no more tokens than these; where it is cut, ids may differ.
        """
        step = COUNTED if len(text) > COUNTED else max(len(text), 1)

        def read(check: Check) -> list[int]:
            check_json(text, "prediction")
            tokens: list[int] = []
            for at in range(0, len(text), step):
                check()
                tokens += self.tokenizer.encode(text[at : at + step], allow_special=False)
                if len(tokens) >= self.max_model_len:
                    break
            return tokens[: self.max_model_len]

        return await _run_maybe_off_loop(read, text)

    def _cut_long_text(self, text: str, check: Check, most: int, marked: bool, truncated: bool) -> str:
        """Returns the end of a long text that truncation may keep, or all of it if it is short enough.

        Raises:
            BadRequest: the text has too many tokens and is not ``truncated``.
        """
        end, count = self.tokenizer.find_kept_end(text, most, check, marked)
        if not truncated and len(end) < len(text):
            sampling_params.check_prompt_length(count, self.max_model_len)
        check()
        return end

    def _check_length(self, tokens: int, most: int) -> None:
        """Raises BadRequest for a prompt of more than ``most`` tokens that leaves no room for its answer."""
        if tokens > most:
            sampling_params.check_prompt_length(tokens, self.max_model_len, self.min_output_tokens)

    def _check_not_truncated(self, prompt: Prompt, limit: int | None) -> Prompt:
        """Returns a prompt with media; raises BadRequest if ``truncate_prompt_tokens`` would cut it."""
        if limit is not None and len(self._truncate_tokens(prompt.tokens, limit, "left")) < len(prompt.tokens):
            raise BadRequest("A prompt with images or videos cannot be truncated.", param="truncate_prompt_tokens")
        return prompt

    def _truncate_tokens(self, tokens: list[int], limit: int, side: str) -> list[int]:
        most = self._get_truncation(limit)
        return tokens[:most] if side == "right" else tokens[-most:]

    def _get_truncation(self, limit: int) -> int:
        """Returns the number of tokens that ``truncate_prompt_tokens`` keeps."""
        if limit < -1 or limit == 0:
            raise BadRequest("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        if limit > self.max_model_len:
            raise BadRequest(
                "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        return self.max_model_len - self.min_output_tokens if limit == -1 else limit


async def _run_maybe_off_loop(work: Callable[[Check], T], *values: Any) -> T:
    """Runs ``work``: on the event loop if a request's ``values`` are small, else in a thread."""
    return work(no_check) if is_small(*values) else await _OFF_LOOP.run(work)
