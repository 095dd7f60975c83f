"""What may stand in a request's answers: a grammar of their text, and rules of their tokens.

The grammar has reasoning, then content in the requested form, or calls. The rules come from sampling parameters:
allowed ids, bad words, thinking budget, repetitions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.core.output_constraints import Repetition, RepetitionDetectionParams, Rule, ThinkingBudget
from trencadis.core.request import SamplingParams
from trencadis.server.grammars import gbnf, lark_grammar_and_tool_functions
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.grammars.json_schema_normaliser import normalise_schema, parse_schema
from trencadis.server.grammars.lark_grammar_and_tool_functions import (
    BETWEEN,
    GrammarWriter,
    ToolFunction,
    WhitespaceRule,
)
from trencadis.server.grammars.regex_translation import escaped, translate_regex
from trencadis.server.grammars.response_format import LARGEST, RequestedFormat, find_requested_format
from trencadis.server.grammars.structural_tags import TagReader
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.prompts.sampling_params import MAX_WORDS
from trencadis.server.protocol.tool_definitions import get_named_function
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.parser_registry import find_reasoning_format
from trencadis.server.tools.reasoning_parser import ReasoningFormat

MOST_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}


def write_content_rule(asked: RequestedFormat, writer: GrammarWriter) -> str:
    """Writes the rule of the content and returns its name.

    Raises:
        BadRequest: the format is invalid; ``param`` is its JSON path.
    """
    value, where = asked.value, asked.where
    if asked.kind == "json":
        return writer.add_json(normalise_schema(parse_schema(value, where), where, asked.closed), asked.spaces)
    if asked.kind == "json_object":
        return writer.add_json(ANY_OBJECT, asked.spaces)
    if asked.kind == "choice":
        return writer.add_rule(f"/{'|'.join(map(escaped, _check_choices(value, where)))}/")
    if asked.kind == "structural_tag":
        return TagReader(writer, asked.spaces).read(value, where)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where} must be a text that is not empty.", param=where)
    if asked.kind == "regex":
        return writer.add_rule(f"/{translate_regex(value, where)}/")
    return write_user_grammar(value, where, asked.spaces, writer)


def write_user_grammar(text: str, where: str, spaces: WhitespaceRule, writer: GrammarWriter) -> str:
    """Writes the rule of a user's grammar, in GBNF or Lark, and returns its name."""
    return writer.add_grammar(
        gbnf.convert_to_lark(text, where)
        if gbnf.is_gbnf(text)
        else lark_grammar_and_tool_functions.check_lark_grammar(text, where, spaces)
    )


def _check_choices(value: Json, where: str) -> list[str]:
    if not isinstance(value, list) or not value or any(not isinstance(one, str) or not one for one in value):
        raise BadRequest(f"{where} must be a list of texts, none of them empty.", param=where)
    if len(value) > MOST_CHOICES:
        raise BadRequest(f"{where} holds more than {MOST_CHOICES} choices.", param=where)
    return value


@dataclass(frozen=True, slots=True)
class RequestedCalls:
    """The calls that an answer may or must hold.

    Args:
        tools: the request's tools, already checked.
        choice: ``tool_choice``.
        many: True if there may be several calls.
        level: ``--tool-strict-level``.
    """

    tools: Sequence[JsonMapping]
    choice: str | JsonMapping | None = None
    many: bool = True
    level: str = "auto"

    @property
    def name(self) -> str | None:
        """The name of the one function that must be called; None if the request names none."""
        return get_named_function(self.choice)

    @property
    def must(self) -> bool:
        """True if the answer must hold a call."""
        return self.choice == "required" or self.name is not None

    @property
    def strict(self) -> bool:
        """True if calls must match their schemas, because a tool or the server's ``--tool-strict-level`` requires
        it.
        """
        return self.level != "auto" or any(tool["function"].get("strict") for tool in self.tools)


@dataclass(frozen=True, slots=True)
class AnswerOutline:
    """The parts of an answer, in order.

    Args:
        forms: how the model writes calls and reasoning.
        thought: start and end tag of the reasoning, and its state when the answer begins
        (``ReasoningFormat.find_state``).
    """

    forms: AnswerParsers
    form: RequestedFormat | None
    calls: RequestedCalls | None
    thought: tuple[str, str, bool, bool] | None

    @property
    def free(self) -> bool:
        """True if the answer needs no grammar."""
        return self.form is None and (self.calls is None or not (self.calls.must or self.calls.strict))

    def make_key(self) -> bytes:
        """Returns the cache key: everything that the grammar depends on."""
        asked = self.form
        form = None if self.forms.tools is None else f"{self.forms.tools.__module__}.{self.forms.tools.__qualname__}"
        calls = self.calls
        parts = [
            None if asked is None else [asked.kind, asked.value, asked.closed, asked.spaces.pattern],
            None if calls is None else [form, list(calls.tools), calls.choice, calls.many, calls.level],
            self.thought,
        ]
        return json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")

    @property
    def param(self) -> str:
        """The field that an error about the whole grammar names."""
        if self.form is not None:
            return self.form.where
        return "tools" if self.calls is not None and not self.calls.must else "tool_choice"

    def write(self, writer: GrammarWriter) -> str:
        """Returns the text of the grammar.

        Raises:
            BadRequest: a part has no grammar.
        """
        inner = self._write_content(writer)
        if self.thought is not None:
            start, end, inside, over = self.thought
            if not over:
                spoken = f"{writer.write_until(end)} {BETWEEN}"
                inner = f"{spoken} {inner}" if inside else f"({writer.write_text(start)} {spoken})? {inner}"
        return writer.write_grammar(inner)

    def _write_content(self, writer: GrammarWriter) -> str:
        content = None if self.form is None else write_content_rule(self.form, writer)
        before = "" if self.forms.reasoning is None else self.forms.reasoning.content
        if content is not None and before:
            content = writer.add_rule(f"{writer.write_text(before)} {content}")
        calls, form = self.calls, self.forms.tools
        if calls is None or form is None:
            assert content is not None
            return content
        exact = calls.must or calls.level == "parameter"
        functions = [
            ToolFunction.from_tool(tool, i, exact or bool(tool["function"].get("strict")))
            for i, tool in enumerate(calls.tools)
            if calls.name in (None, tool["function"]["name"])
        ]
        many = calls.many and calls.name is None
        if calls.must:
            return form.calls_rule(writer, functions, many)
        if content is not None:
            return writer.add_rule(f"{form.calls_rule(writer, functions, many)} | {content}")
        return form.free_text_rule(writer, functions, many)


async def add_answer_grammar(
    cache: GrammarCache,
    forms: AnswerParsers,
    tokenizer: Tokenizer,
    prompt: Prompt,
    asked: RequestedFormat | None,
    calls: RequestedCalls | None = None,
    *,
    continued: bool = False,
) -> None:
    """Sets the prompt's rule to the grammar of its answers, if their form is restricted.

    Raises:
        BadRequest: the form has no grammar; ``param`` says where.
    """
    outline = AnswerOutline(forms, asked, calls, None)
    if outline.free:
        return
    if calls is not None and len(json.dumps(list(calls.tools), ensure_ascii=False)) > LARGEST:
        raise BadRequest(f"tools exceed {LARGEST >> 10} KB, the most that a grammar is made of.", param="tools")
    if forms.reasoning is not None:
        tags = forms.reasoning
        outline = replace(
            outline, thought=(tags.start, tags.end, *tags.find_state(tokenizer, prompt.tokens, continued))
        )
    grammar = await cache.get_grammar(outline.make_key(), lambda: outline.write(cache.make_writer()), outline.param)
    prompt.rule = replace(prompt.rule or Rule(), grammar=grammar)


def add_rule(
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab: int,
    reasoning: ReasoningFormat | None = None,
    continued: bool = False,
) -> None:
    """Adds the restrictions in ``params`` to the prompt's rule, whose grammar stays.

    Args:
        vocab: number of ids that the model can sample.
        reasoning: the format of the model's reasoning; None: not known.
        continued: the prompt ends within a message of the assistant.

    Raises:
        BadRequest: an id is outside of the vocabulary, there are too many words, or a thinking budget is set and the
        model's reasoning format is not known.
    """
    allowed, words = params.allowed_token_ids, params.bad_words
    budget, repetition = params.thinking_token_budget, params.repetition_detection
    if allowed is None and not words and budget is None and repetition is None:
        return
    prompt.rule = replace(
        prompt.rule or Rule(),
        allowed=_check_allowed_ids(allowed or (), vocab),
        words=_tokenize_words(words, tokenizer),
        thinking=None
        if budget is None
        else _make_thinking_budget(budget, reasoning, prompt.tokens, tokenizer, continued),
        repetition=None if repetition is None else _make_repetition_rule(repetition),
    )


def _check_allowed_ids(ids: Sequence[int], vocab: int) -> tuple[int, ...]:
    bad = next((t for t in ids if not 0 <= t < vocab), None)
    if bad is not None:
        raise BadRequest(
            f"allowed_token_ids contains {bad}, outside the vocabulary of {vocab}.", param="allowed_token_ids"
        )
    return tuple(sorted(set(ids)))


def _tokenize_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns each word's ids at the start of a text, and also after a blank if these begin differently and are equally
    many.

    A longer form after a blank would be the blank and the word, which the first form covers.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), allow_special=False))
        blank = tuple(tokenizer.encode(f" {word.lstrip()}", allow_special=False))
        if not bare:
            raise BadRequest("A bad word must be at least one token.", param="bad_words")
        found[bare] = None
        if blank and blank[0] != bare[0] and len(blank) == len(bare):
            found[blank] = None
        if len(found) > MAX_WORDS:
            raise BadRequest(f"bad_words must be at most {MAX_WORDS} sequences of tokens.", param="bad_words")
    return tuple(found)


def _make_thinking_budget(
    budget: int, form: ReasoningFormat | None, prompt: Sequence[int], tokenizer: Tokenizer, continued: bool
) -> ThinkingBudget | None:
    if form is None:
        raise BadRequest(
            "thinking_token_budget needs a model whose thoughts can be told from its answers (--reasoning-parser).",
            param="thinking_token_budget",
        )
    inside, over = form.find_state(tokenizer, prompt, continued)
    if over:
        return None
    start, end = (tuple(tokenizer.encode(tag)) for tag in form.tags)
    return ThinkingBudget(budget, start, end, inside)


def _make_repetition_rule(asked: RepetitionDetectionParams) -> Repetition | None:
    if asked.max_pattern_size == 0:
        return None
    return Repetition(max(asked.min_pattern_size, 1), asked.max_pattern_size, asked.min_count)


def add_sampling_rule(service: TextService, prompt: Prompt, params: SamplingParams) -> None:
    """Attaches the token rule that ``params`` require to a prompt; the reasoning format is read from the chat template.

    Raises:
        BadRequest: an id is outside of the vocabulary, there are too many bad words, or there is a thinking budget for
            a model without reasoning marks.
    """
    form = find_reasoning_format("auto", service.template.source if service.template is not None else None)
    add_rule(prompt, params, service.tokenizer, service.limits.vocab, form)


async def apply_structured_outputs(
    grammars: GrammarCache, service: TextService, prompt: Prompt, params: SamplingParams
) -> SamplingParams:
    """Attaches the grammar that ``params`` require to a prompt; returns the parameters without it, as the engine
    accepts them.

    Raises:
        BadRequest: no grammar can be built for the format, or both fields are set.
    """
    given, guided = params.structured_outputs, params.guided_decoding
    if given is None and guided is None:
        return params
    if given is not None and guided is not None:
        raise BadRequest("structured_outputs and guided_decoding are the same; give one.", param="guided_decoding")
    one = given or guided
    held = one if isinstance(one, Mapping) else one.as_fields() if one is not None else {}
    await add_answer_grammar(
        grammars, AnswerParsers(), service.tokenizer, prompt, find_requested_format(None, held, {})
    )
    return replace(params, structured_outputs=None, guided_decoding=None)
