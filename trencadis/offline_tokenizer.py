"""The tokenizer for offline callers: the methods of transformers' tokenizers over the model's own tokenizer and
template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.engine_args import read_template
from trencadis.server.prompts.prompt_builder import TextService


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask``, accessible by key or attribute."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class OfflineTokenizer:
    """Converts text to ids and back.

    Other attributes are those of the engine's own tokenizer (``token_id``, ``get_token_bytes`` ...).
    """

    def __init__(self, service: TextService) -> None:
        self._service = service
        self._own = service.tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_token_id") and name.removesuffix("_id") in (*_ROLES, *self._own.named):
            token = self._own.named.get(name.removesuffix("_id"))
            return None if token is None else self._own.find_token_id(token)
        if name in _ROLES:
            return self._own.named.get(name)
        return getattr(self._own, name)

    def __len__(self) -> int:
        return self._own.vocab_size

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_attention_mask: bool = True
    ) -> Encoding:
        """Returns the ids of a text, or of each of several, with the special tokens that the checkpoint adds around
        a text.
        """
        one = isinstance(text, str)
        texts = [text] if isinstance(text, str) else list(text)
        ids = [self._own.encode(t, True, add_special_tokens) for t in texts]
        made = Encoding(input_ids=ids[0] if one else ids)
        if return_attention_mask:
            masks = [[1] * len(i) for i in ids]
            made["attention_mask"] = masks[0] if one else masks
        return made

    def encode(self, text: str, allow_special: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text."""
        return self._own.encode(text, allow_special, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._own.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Returns the texts of several sequences of ids."""
        return [self.decode(one, skip_special_tokens) for one in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token's exact text, or of each of several; None for unknown ones."""
        return (
            self._own.find_token_id(tokens) if isinstance(tokens, str) else [self._own.find_token_id(t) for t in tokens]
        )

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Returns the vocabulary's text of an id, or of each of several."""
        return self._own.get_token(ids) if isinstance(ids, int) else [self._own.get_token(i) for i in ids]

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of special tokens, ascending."""
        return sorted(self._own.special_ids)

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; None without one."""
        return None if self._service.template is None else self._service.template.source

    def apply_chat_template(
        self,
        conversation: Sequence[Json],
        tools: Sequence[JsonMapping] | None = None,
        documents: Sequence[JsonMapping] | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Renders a conversation, or each of a list of them, by the chat template.

        Returns:
            The text; with ``tokenize`` its ids, with ``return_dict`` in an ``Encoding``.

        Raises:
            BadRequest: there is no template, or it raises an error.
        """
        if self._service.template is None:
            raise BadRequest("This model has no chat template; give one with chat_template=.", param="chat_template")
        template = self._service.template
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        texts = [
            self._own.unmark(
                template.render(
                    template.scrub(list(messages)),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    documents=documents,
                    kwargs=kwargs,
                    chat_template=read_template(chat_template),
                )
            )
            for messages in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        made = self(texts if several else texts[0], add_special_tokens=False)
        return made if return_dict else made["input_ids"]


_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
