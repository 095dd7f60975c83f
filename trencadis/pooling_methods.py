"""The methods ``embed``, ``classify``, ``reward``, ``score`` and ``encode`` of ``LLM``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trencadis.core.checkpoint.pooling_description import CLASSIFY, EMBED, TOKEN_TASKS, Pooling
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping
from trencadis.core.request import AdapterRef
from trencadis.engine_args import read_template
from trencadis.llm_engine import LLMEngine, UseTqdm
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.offline_adapters import LoRARequests
from trencadis.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from trencadis.prompt_inputs import PromptType, as_list, read_prompt
from trencadis.server.prompts.pooling_prompts import (
    Pair,
    check_scores,
    make_pair_prompt,
    make_pooling_request,
    read_content,
)
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.protocol.pooler_output import (
    Float32,
    compute_pair_score,
    convert_to_floats,
    cosine_similarity,
    finish_pooled,
    read_raw_values,
)
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.unsupported_vllm_names import refuse_tokenization_kwargs

Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods:
    """Mixin that gives ``LLM`` the calls of an engine with ``runner="pooling"``."""

    llm_engine: LLMEngine
    _request_numbers: itertools.count[int]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: str | None = None,
        tokenization_kwargs: JsonMapping | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns pooled values of each prompt: embeddings or probabilities. Prompts are those of ``generate``.

        Args:
            pooling_task: replaces the parameters' task; ``token_embed`` and ``token_classify`` return values of every
                token, [tokens, width].
            truncate_prompt_tokens: as in the parameters; also accepted in ``tokenization_kwargs``, as in vLLM.

        Raises:
            BadRequest: the engine generates, or a prompt or a parameter is at fault.
        """
        others = dict(tokenization_kwargs or {})
        cut = others.pop("truncate_prompt_tokens", truncate_prompt_tokens)
        refuse_tokenization_kwargs(others)
        pooling = self._pooling_config("encode", pooling_task)
        items = as_list(prompts)
        params = _params_per_prompt(pooling_params, len(items))
        if pooling_task is not None:
            params = [replace(p, task=pooling_task) for p in params]
        if cut is not None:
            params = [replace(p, truncate_prompt_tokens=cut) for p in params]
        self._check_params(params, pooling)
        service, wait = self.llm_engine.service, self.llm_engine.wait
        made = wait(gather_or_cancel(read_prompt(service, i, p) for i, p in zip(items, params, strict=True)))
        outputs = self._pool(
            made, pooling, params, use_tqdm, self.llm_engine.adapters.find_all(lora_request, len(made))
        )
        return [
            _make_output(output, PoolingOutput(finish_pooled(_raw_values(output, pooling, p), pooling, p)))
            for output, p in zip(outputs, params, strict=True)
        ]

    def embed(
        self, prompts: PromptType | Sequence[PromptType], *, pooling_params: Params = None, **more: Any
    ) -> list[EmbeddingRequestOutput]:
        """Returns one embedding per prompt; other arguments as in ``encode``."""
        self._pooling_config("embed", EMBED)
        made = self.encode(prompts, pooling_params, **more)
        return [EmbeddingRequestOutput.like(o, EmbeddingOutput(convert_to_floats(o.outputs.data))) for o in made]

    def classify(
        self, prompts: PromptType | Sequence[PromptType], *, pooling_params: Params = None, **more: Any
    ) -> list[ClassificationRequestOutput]:
        """Returns the probability of each class for each prompt; other arguments as in ``encode``."""
        self._pooling_config("classify", CLASSIFY)
        made = self.encode(prompts, pooling_params, **more)
        return [
            ClassificationRequestOutput.like(o, ClassificationOutput(convert_to_floats(o.outputs.data))) for o in made
        ]

    def reward(
        self, prompts: PromptType | Sequence[PromptType], *, pooling_params: Params = None, **more: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns a reward model's values of every token, [tokens, classes], or of every step, [steps, classes], for a
        model that scores steps.

        Other arguments as in ``encode``.
        """
        return self.encode(prompts, pooling_params, pooling_task=TOKEN_TASKS[CLASSIFY], **more)

    def score(
        self,
        data_1: object,
        data_2: object,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        instruction: str = "",
    ) -> list[ScoringRequestOutput]:
        """Returns relevance scores of pairs: by the classification head, by the logits of the label tokens, or by the
        cosine of embeddings.

        Args:
            data_1: one query, or as many as there are documents in ``data_2``; a text, or ``{"content": [parts]}`` with
                images.
            instruction: criterion of relevance for a chat model that judges pairs; "": a document must answer the
                query.

        Raises:
            BadRequest: the engine does not support scores, or a text or a parameter is at fault.
        """
        pooling = self._pooling_config("score", None)
        check_scores(pooling)
        params = pooling_params or PoolingParams()
        self._check_params([params], pooling)
        cut = params.truncate_prompt_tokens if truncate_prompt_tokens is None else truncate_prompt_tokens
        pairs = _make_pairs(data_1, data_2)
        if pooling.task == EMBED:
            return self._score_by_cosine(pairs, pooling, cut, use_tqdm, lora_request)
        service = self.llm_engine.service
        template = read_template(chat_template)
        made = self.llm_engine.wait(
            gather_or_cancel(
                make_pair_prompt(service, pooling, p, instruction=instruction, truncate=cut, chat_template=template)
                for p in pairs
            )
        )
        adapters = self.llm_engine.adapters.find_all(lora_request, len(made))
        outputs = self._pool(made, pooling, [params] * len(made), use_tqdm, adapters)
        return [
            _make_output(
                o,
                ScoringOutput(compute_pair_score(_raw_values(o, pooling, params), pooling, params)),
                ScoringRequestOutput,
            )
            for o in outputs
        ]

    def _score_by_cosine(
        self, pairs: Sequence[Pair], pooling: Pooling, cut: int | None, use_tqdm: UseTqdm, lora_request: LoRARequests
    ) -> list[ScoringRequestOutput]:
        texts: list[Any] = list(dict.fromkeys(side for pair in pairs for side in _pair_texts(pair)))
        made = self.llm_engine.wait(self.llm_engine.service.make_raw_prompts(texts, truncate=cut))
        params = PoolingParams()
        adapters = self.llm_engine.adapters.find_all(lora_request, len(made))
        outputs = dict(zip(texts, self._pool(made, pooling, [params] * len(made), use_tqdm, adapters), strict=True))
        found = []
        for pair in pairs:
            a, b = (outputs[text] for text in _pair_texts(pair))
            one = cosine_similarity(_raw_values(a, pooling, params), _raw_values(b, pooling, params))
            joined = [*a.prompt_token_ids, *b.prompt_token_ids]
            cached = a.num_cached_tokens + b.num_cached_tokens
            found.append(ScoringRequestOutput(f"{a.request_id}_{b.request_id}", ScoringOutput(one), joined, cached))
        return found

    # Parameters

    def _pooling_config(self, call: str, task: str | None) -> Pooling:
        pooling = self.llm_engine.service.config.pooling
        if pooling is None:
            raise BadRequest(f'LLM.{call} needs an engine made with runner="pooling".')
        PoolingParams(task=task).check(pooling, self.llm_engine.service.config.text.hidden)
        return pooling

    def _check_params(self, params: Sequence[PoolingParams], pooling: Pooling) -> None:
        for one in params:
            one.check(pooling, self.llm_engine.service.config.text.hidden)

    # Running

    def _pool(
        self, prompts: Sequence[Prompt], pooling: Pooling, params: Sequence[PoolingParams], use_tqdm: UseTqdm,
        adapters: Sequence[AdapterRef | None],
    ) -> list[RequestOutput]:  # fmt: skip
        def submit() -> Iterator[str]:
            for prompt, one, adapter in zip(prompts, params, adapters, strict=True):
                request_id = f"pool-{next(self._request_numbers)}"
                request = make_pooling_request(request_id, prompt, pooling, one, arrival=0.0)
                request.adapter = adapter
                self.llm_engine.submit_request(request, prompt)
                yield request_id

        return self.llm_engine.run_to_end(submit(), len(prompts), use_tqdm)


def _raw_values(made: RequestOutput, pooling: Pooling, params: PoolingParams) -> Float32:
    return read_raw_values(made.pooled, pooling, params, made.prompt_token_ids)


def _make_output(made: RequestOutput, outputs: Any, kind: type[Any] = PoolingRequestOutput) -> Any:
    return kind(made.request_id, outputs, made.prompt_token_ids, made.num_cached_tokens)


def _params_per_prompt(given: Params, count: int) -> Sequence[PoolingParams]:
    if given is None or isinstance(given, PoolingParams):
        return [given or PoolingParams()] * count
    if len(given) != count:
        raise BadRequest(f"{count} prompts came with {len(given)} pooling parameters.", param="pooling_params")
    return given


def _make_pairs(data_1: object, data_2: object) -> list[Pair]:
    """Pairs one query with every document, or each query with its document.

    Raises:
        BadRequest: the numbers of queries and documents differ and there is not exactly one query.
    """
    queries, documents = (x if isinstance(x, list) else [x] for x in (data_1, data_2))
    if not queries or not documents or len(queries) not in (1, len(documents)):
        raise BadRequest(f"{len(queries)} queries came with {len(documents)} documents.", param="data_1")
    queries = queries * (len(documents) // len(queries))
    return [Pair(read_content(q, "data_1"), read_content(d, "data_2")) for q, d in zip(queries, documents, strict=True)]


def _pair_texts(pair: Pair) -> tuple[str, str]:
    if not (isinstance(pair.query, str) and isinstance(pair.document, str)):
        raise BadRequest("Cosines of embeddings are for texts here; embed images by embed().", param="data_1")
    return pair.query, pair.document
