"""Prompts of pooling requests, and their run on the engine.

The engine's request of a prompt that is pooled draws nothing. Texts that are longer than the model's length run in
parts, and the parts' vectors are averaged. A pair of texts is a query and a document for a class head, or a chat prompt
in which a model judges the pair. A checkpoint may put texts before an input of a given kind, such as ``query: ``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.pooling_description import ALL, EMBED, Pooling
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_SCOPE, MediaScope
from trencadis.server.prompts.generation_stream import Generation, merge_generations
from trencadis.server.prompts.multimodal_inputs import make_token_positions
from trencadis.server.prompts.prompt_and_chat_messages import PAIR_ROLES, Prompt
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.prompts.sampling_params import check_prompt_length
from trencadis.server.protocol.pooler_output import Float32, Float64, Raw, read_raw_values
from trencadis.server.protocol.pooling_params import PoolingParams


class Chunks(NamedTuple):
    """Parts of prompts, in order, and of which prompt each is."""

    prompts: list[Prompt]
    owners: list[int]


def divide_prompts(prompts: Sequence[Prompt], text: TextConfig, size: int) -> Chunks:
    """Divides prompts of more than ``size`` tokens, which have no media, into parts of at most ``size``."""
    made = Chunks([], [])
    for i, prompt in enumerate(prompts):
        if len(prompt.tokens) <= size:
            parts = [prompt]
        else:
            ids = [prompt.tokens[at : at + size] for at in range(0, len(prompt.tokens), size)]
            parts = [Prompt(part, None, None if text.causal else make_token_positions(text, part)) for part in ids]
        made.prompts.extend(parts)
        made.owners.extend([i] * len(parts))
    return made


def average_chunks(chunks: Chunks, values: Sequence[Raw]) -> list[Float64]:
    """One vector a prompt: the mean of its parts' ``values``, each [width], weighted by their tokens."""
    count = chunks.owners[-1] + 1 if chunks.owners else 0
    sums: list[Float64] = [np.zeros(0)] * count
    totals = [0] * count
    for owner, prompt, vector in zip(chunks.owners, chunks.prompts, values, strict=True):
        weighted = vector.astype(np.float64) * len(prompt.tokens)
        sums[owner] = weighted if not totals[owner] else sums[owner] + weighted
        totals[owner] += len(prompt.tokens)
    return [whole / total for whole, total in zip(sums, totals, strict=True)]


def make_pooling_request(
    id: str,
    prompt: Prompt,
    pooling: Pooling,
    params: PoolingParams,
    *,
    arrival: float,
    salt: str = "",
    priority: int = 0,
) -> Request:
    """Returns the engine's request of one prompt; its sampling parameters are defaults without effect."""
    made = prompt.make_request(id, SamplingParams(detokenize=False), arrival=arrival, salt=salt, priority=priority)
    made.pool = ALL if params.wants_token_values(pooling) else pooling.kind
    return made


async def run_pooling(generations: Sequence[Generation], pooling: Pooling, params: PoolingParams) -> list[Float32]:
    """Returns ``read_raw_values`` of each generation, in order; the first error ends all of them.

    Raises:
        TrencadisError: the engine failed.
    """
    async with aclosing(merge_generations(generations)) as pieces:
        async for _ in pieces:
            pass
    return [read_raw_values(g.streams[0].pooled, pooling, params, g.prompt.tokens) for g in generations]


Content = str | Sequence[Json]
"""A text, or parts as a chat message has them."""

TASK = "Decide whether the document answers the query."


class Pair(NamedTuple):
    """One query and one document."""

    query: Content
    document: Content


def read_content(value: Json, param: str) -> Content:
    """Reads one side of a pair from a request: a text, or ``{"content": [parts]}``.

    Raises:
        BadRequest: it is something else, or empty.
    """
    held = value
    if isinstance(value, Mapping):
        held = value.get("content", value.get("text"))
    if (isinstance(held, str) or (isinstance(held, list) and all(isinstance(p, Mapping) for p in held))) and held:
        return held
    raise BadRequest(f"{param} must be a text, or an object with a list of parts as content.", param=param)


def check_scores(pooling: Pooling) -> None:
    """Raises BadRequest if this engine computes no score of a pair."""
    if pooling.kind == ALL:
        raise BadRequest(f"A score is of a whole pair, and this server does {pooling.tasks[0]!r}; /pooling serves it.")
    if pooling.task != EMBED and not pooling.scores:
        raise BadRequest(
            f"A score needs a class head with one class, and this model has {pooling.classes}; "
            "embeddings or yes/no logits (--convert) give scores too."
        )


async def make_pair_prompt(
    service: TextService,
    pooling: Pooling,
    pair: Pair,
    *,
    instruction: str = "",
    truncate: int | None = None,
    document_tokens: int = 0,
    kwargs: JsonMapping | None = None,
    chat_template: str | None = None,
    scope: MediaScope = NO_SCOPE,
    known: dict[str, list[int]] | None = None,
) -> Prompt:
    """Makes the prompt that scores ``pair``.

    Args:
        instruction: the criterion that the document is judged by; "": that it answers the query.
        truncate: most tokens of the whole prompt, whose end is cut.
        document_tokens: most tokens of the document's text; 0: no limit.
        chat_template: in place of the model's.
        known: ids of queries by text, so that a query with many documents is tokenized once.

    Raises:
        BadRequest: parts for a model that takes texts alone, or a prompt that is too long.
    """
    if document_tokens:
        pair = Pair(pair.query, await _truncate_content(service, pair.document, document_tokens))
    template = service.template
    source = chat_template or ("" if template is None else template.text)
    own = template is not None and all(re.search(rf"""['"]{role}['"]""", source) for role in PAIR_ROLES)
    if own or pooling.label_tokens:
        return await _make_judge_prompt(
            service, pair, own, pooling.labels, instruction, truncate, kwargs, chat_template, scope
        )
    if not (isinstance(pair.query, str) and isinstance(pair.document, str)):
        raise BadRequest("This model scores texts alone.", param="documents")
    if instruction:
        raise BadRequest("instruction is for chat models that judge, and this is a class head.", param="instruction")
    if not service.config.text.causal:
        return await service.make_pair_prompt(pair.query, pair.document, truncate)
    known = {} if known is None else known
    if pair.query not in known:
        known[pair.query] = (
            await service.make_raw_prompt(pair.query, truncation_side="right", truncate=truncate)
        ).tokens
    document = await service.make_raw_prompt(pair.document, truncation_side="right", truncate=truncate)
    tokens = known[pair.query] + document.tokens
    if truncate is not None:
        tokens = tokens[: service.max_model_len if truncate == -1 else truncate]
    check_prompt_length(len(tokens), service.max_model_len, 0)
    return Prompt(tokens)


async def _make_judge_prompt(
    service: TextService,
    pair: Pair,
    own: bool,
    labels: tuple[str, ...],
    instruction: str,
    truncate: int | None,
    kwargs: JsonMapping | None,
    chat_template: str | None,
    scope: MediaScope,
) -> Prompt:
    """Makes a chat prompt whose answer begins with a label token; ``own``: the template has roles for the pair's
    sides.
    """
    if own:
        messages: list[Json] = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}]
    else:
        words = " or ".join(f'"{word}"' for word in reversed(labels))
        system = f"{instruction or TASK} Answer with {words} only."
        parts = [
            _make_text_part("Query: "),
            *_make_parts(pair.query),
            _make_text_part("\nDocument: "),
            *_make_parts(pair.document),
        ]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": _join_if_text(parts)}]
    thinks = service.template is not None and service.template.mentions("enable_thinking")
    variables = {**({"enable_thinking": False} if thinks else {}), **(kwargs or {})}
    return await service.make_chat_prompt(
        messages,
        add_generation_prompt=True,
        kwargs=variables,
        chat_template=chat_template,
        truncate=truncate,
        truncation_side="right",
        scope=scope,
    )


async def _truncate_content(service: TextService, content: Content, most: int) -> Content:
    """Cuts the text of ``content`` to ``most`` tokens; parts other than texts stay."""
    if not isinstance(content, str):
        return content
    made = await service.make_raw_prompt(content, add_special_tokens=False, truncate=most, truncation_side="right")
    return content if made.text is not None else service.tokenizer.decode(made.tokens, skip_special_tokens=False)


def _make_text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _make_parts(content: Content) -> list[Json]:
    return [_make_text_part(content)] if isinstance(content, str) else list(content)


def _join_if_text(parts: list[Json]) -> str | list[Json]:
    """Returns one text if all parts are texts, since some templates accept only texts; else the parts."""
    texts = [p.get("text") if p.get("type") == "text" else None for p in parts]
    return "".join(t for t in texts if t) if all(isinstance(t, str) for t in texts) else parts


def read_input_prompts(path: Path) -> Mapping[str, str]:
    """The texts by ``input_type``: ``task_instructions`` of config.json, else ``prompts`` of sentence-transformers.

    Raises:
        StartupError: a file is not JSON.
    """
    for name, key in (("config.json", "task_instructions"), ("config_sentence_transformers.json", "prompts")):
        found = (read_json(path / name) or {}).get(key)
        if isinstance(found, dict) and found:
            return {str(k): v for k, v in found.items() if isinstance(v, str)}
    return {}


def get_input_prompt(known: Mapping[str, str], kind: str | None) -> str:
    """The text for ``kind``; "" for None.

    Raises:
        BadRequest: the checkpoint has none of that kind.
    """
    if kind is None:
        return ""
    if kind not in known:
        names = ", ".join(sorted(known))[:120]
        line = f"one of {names} is needed" if known else "this model has no texts for kinds of inputs; leave it out"
        raise BadRequest(f"Unsupported input_type {kind[:40]!r}; {line}.", param="input_type")
    return known[kind]
