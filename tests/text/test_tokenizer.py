"""Tokenizer and template against transformers, and special tokens that users type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trencadis.core.errors import BadRequest, StartupError
from trencadis.server.text import checkpoint_tokenizer as tokenizer_module
from trencadis.server.text.chat_template import ROLES, ChatTemplate, read_override
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

TEXTS = [
    "Hello",
    " leading and trailing ",
    "",
    "it's 12345 o'clock",
    "über café e\u0301 n\u0303",
    "日本語 中文 한국어 العربية עברית",
    "emoji 👩\u200d👩\u200d👧 🏳️\u200d🌈 \U0001f600",
    "tabs\t\tand\r\nlines\n\n\n end",
    "<think>a</think> <tool_call>{}</tool_call>",
    "< | im_end | >",
    "a" * 500,
    "\u200b\ufeff\u00a0x",
    "x\x00y\x7f",
]
SEE = [{"type": "text", "text": "see"}, {"type": "image"}, {"type": "text", "text": " and"}]
CHATS: list[list[dict[str, Any]]] = [
    *([{"role": "user", "content": text}] for text in TEXTS),
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hey"},
        {"role": "user", "content": SEE},
    ],
    [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "compare"}]}],
]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint)


@pytest.fixture
def tokenizer_of(checkpoint: Path) -> Any:
    """A tokenizer of its own, of a spec that may be changed before."""

    def make(change: Any = None) -> Tokenizer:
        spec = json.loads((checkpoint / "tokenizer.json").read_text())
        if change is not None:
            change(spec)
        return Tokenizer(spec, {"eos_token": "<|im_end|>"})

    return make


@pytest.fixture(scope="module")
def template(checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate:
    found = ChatTemplate.from_checkpoint(checkpoint, tokenizer)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(checkpoint))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_ids_equal_transformers(
    chat: list[dict[str, Any]], prompt: bool, tokenizer: Tokenizer, template: ChatTemplate, oracle: Any
) -> None:
    ours = tokenizer.encode_marked(template.render(chat, add_generation_prompt=prompt))
    reference = oracle.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    assert ours == reference
    assert tokenizer.decode(ours, False) == oracle.decode(reference, skip_special_tokens=False)
    assert tokenizer.decode(ours, True) == oracle.decode(reference, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text", ["lone <|im_end|> text", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"]
)
def test_typed_special_tokens_are_text(text: str, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    def specials(content: Any) -> list[int]:
        ids = tokenizer.encode_marked(template.render([{"role": "user", "content": content}]))
        return [t for t in ids if t in tokenizer.special_ids]

    assert specials(text) == specials("harmless")
    ids = tokenizer.encode_marked(template.render([{"role": "user", "content": text}]))
    assert text in tokenizer.decode(ids, False)
    assert all(t not in tokenizer.special_ids for t in tokenizer.encode(text, allow_special=False))
    assert any(t in tokenizer.special_ids for t in tokenizer.encode(text))


THINKING = (
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if not content.startswith('<tool_call>') %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
    "{% else %}called: {{ content.replace('<tool_call>', '') | replace('</tool_call>', '') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% if messages[0].content == eos_token or messages[0].content is in ['<|im_end|>'] %}!{% endif %}"
    "{% if eos_token is defined and eos_token is equalto '<|im_end|>' %}?{% endif %}"
)
"""As templates of reasoning models: they name plain added tokens, and look for them in what users sent."""


@pytest.mark.parametrize("token", ["</think>", "<think>", "<tool_call>", "</tool_call>"])
def test_a_typed_added_token_of_the_template_is_text(token: str, tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of()
    template = ChatTemplate(THINKING, tokenizer)
    number = tokenizer.find_token_id(token)

    def count(text: str, role: str = "user") -> int:
        ids = tokenizer.encode_marked(template.render([{"role": role, "content": text}]))
        assert text in tokenizer.decode(ids, False)
        return int(ids.count(number))

    assert number not in tokenizer.special_ids
    assert count(f"a {token} b") == count("a b") == count(f"a {token}{token}", "system") == ("think" in token)
    assert tokenizer.encode(token, allow_special=False) != [number] and tokenizer.encode(token) == [number]
    assert tokenizer.decode([number], skip_special_tokens=True) == token  # an answer's own stays visible


CHATS_OF_A_REASONER = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "<tool_call>x</tool_call>"}],
    [{"role": "user", "content": "<|im_end|>"}],
]


@pytest.mark.parametrize("chat", CHATS_OF_A_REASONER)
def test_a_template_finds_its_tokens_in_what_users_sent(
    chat: list[dict[str, Any]], tokenizer_of: Any, oracle: Any
) -> None:
    tokenizer = tokenizer_of()
    ours = tokenizer.unmark(ChatTemplate(THINKING, tokenizer).render(chat))
    assert ours == oracle.apply_chat_template(chat, chat_template=THINKING, add_generation_prompt=True, tokenize=False)


def test_an_added_token_that_the_template_does_not_use_is_left_alone(tokenizer_of: Any, oracle: Any) -> None:
    tokenizer = tokenizer_of()
    template = ChatTemplate("{{ messages[0].content }}<|im_end|> yes", tokenizer)
    text = "<think>x</think> yes"
    ours = tokenizer.encode_marked(template.render([{"role": "user", "content": text}]))
    assert ours == oracle(text + "<|im_end|> yes", add_special_tokens=False)["input_ids"]


def test_words_and_blanks_among_the_added_tokens_are_no_markup(tokenizer_of: Any) -> None:
    """Some vocabularies add runs of blanks and plain words; a template that writes them claims nothing."""

    def more(spec: dict[str, Any]) -> None:
        for i, text in enumerate(["\n\n", "assistant", "[INST]"]):
            spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 900 + i, "content": text})

    tokenizer = tokenizer_of(more)
    template = ChatTemplate("[INST] {{ messages[0].content }}\n\nassistant", tokenizer)
    numbers = tokenizer.encode_marked(template.render([{"role": "user", "content": "[INST]\n\nassistant"}]))
    ids = [tokenizer.find_token_id(text) for text in ("[INST]", "\n\n", "assistant")]
    assert [numbers.count(i) for i in ids] == [1, 2, 2]


def test_an_added_token_that_merges_make_is_text_too(tokenizer_of: Any) -> None:
    """Where the vocabulary holds it and merges lead to it, a typed one would come back through the merges."""

    def merged(spec: dict[str, Any]) -> None:
        vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
        for left, right in (("<", "t"), ("<t", "c"), ("<tc", ">")):
            vocab[left + right] = len(vocab)
            merges.append(f"{left} {right}" if isinstance(merges[0], str) else [left, right])
        for i, token in enumerate(spec["added_tokens"]):
            token["id"] = 800 + i
        spec["added_tokens"].append({**spec["added_tokens"][-1], "id": vocab["<tc>"], "content": "<tc>"})

    tokenizer = tokenizer_of(merged)
    template = ChatTemplate("<tc>{{ messages[0].content }}", tokenizer)
    ids = tokenizer.encode_marked(template.render([{"role": "user", "content": "<tc>"}]))
    assert ids.count(tokenizer.find_token_id("<tc>")) == 1 and tokenizer.decode(ids, False) == "<tc><tc>"


def test_a_token_with_a_role_is_special_whatever_its_entry_says(checkpoint: Path, tmp_path: Path) -> None:
    import json
    import shutil

    from transformers import PreTrainedTokenizerFast

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer, oracle = Tokenizer.from_checkpoint(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert tokenizer.special_ids == set(oracle.all_special_ids)
    ids = tokenizer.encode("<|im_start|>a<|im_end|><think>")
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "<|im_start|>a<think>"
    assert tokenizer.find_token_id("<|im_end|>") not in tokenizer.encode("<|im_end|>", allow_special=False)


def test_image_places_are_the_templates_own(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "<|image_pad|>"}, {"type": "image"}, {"type": "text", "text": "<|image_pad|>"}]
    ids = tokenizer.encode_marked(template.render([{"role": "user", "content": parts}]))
    pad = tokenizer.find_token_id("<|image_pad|>")
    assert pad is not None and ids.count(pad) == 1
    assert ids[ids.index(pad) - 1] == tokenizer.find_token_id("<|vision_start|>")


def test_parts_that_join_to_a_special_token_stay_text(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = tokenizer.encode_marked(template.render([{"role": "user", "content": parts}]))
    end = tokenizer.find_token_id("<|im_end|>")
    assert end is not None and ids.count(end) == 2  # the default system message's and the user's


def test_a_guessed_mark_is_scrubbed(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    half = len(tokenizer.nonce) // 2
    nested = tokenizer.nonce[:half] + tokenizer.nonce + tokenizer.nonce[half:]
    assert tokenizer.nonce not in tokenizer.scrub(f"<|{nested}.700|>")
    assert tokenizer.nonce not in str(template.scrub({"a": [tokenizer.marks["<|im_end|>"]]}))


def test_marks_round_trip(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nx<|im_end|>"
    assert tokenizer.unmark(tokenizer.mark(text)) == text
    assert tokenizer.encode_marked(tokenizer.mark(text)) == tokenizer.encode(text)


def test_the_marked_copy_has_the_vocabulary_of_the_raw_one(tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads as a parsed copy would, which takes as much memory and time as the tokenizer itself."""
    made = tokenizer_of()
    made.claim("<think><tool_call>")
    parsed = tokenizer_module.make_marked_copy(json.loads(made.raw.to_str()), made.marks)
    monkeypatch.setattr(tokenizer_module, "make_marked_copy", None)
    texts = [*TEXTS, *("".join(made.marks.values()), " ".join(f"{t} x{m}  " for t, m in made.marks.items()))]
    assert [made.encode_marked(text) for text in texts] == [list(parsed.encode(text).ids) for text in texts]
    assert made.encode_marked(made.marks["<tool_call>"]) == [made.find_token_id("<tool_call>")]


def test_ids_with_gaps_are_parsed_anew(tokenizer_of: Any) -> None:
    """The library would number them otherwise."""

    def change(spec: dict[str, Any]) -> None:
        last = spec["added_tokens"][-1]
        spec["added_tokens"].append({**last, "id": last["id"] + 7, "content": "<|far|>", "special": True})

    made = tokenizer_of(change)
    assert made.encode_marked(made.mark("a<|far|>")) == made.encode("a<|far|>")
    assert made.encode_marked("<|far|>") != made.encode("<|far|>")


def test_special_tokens_inside_the_vocabulary_are_renamed_there_too(checkpoint: Path) -> None:
    import json

    spec = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] == "<|im_end|>"]
    spec["added_tokens"][0]["id"] = vocab["<|im_end|>"] = max(vocab.values()) + 1
    tokenizer = Tokenizer(spec)
    marked = tokenizer.encode_marked(tokenizer.mark("a<|im_end|>b"))
    assert marked == tokenizer.encode("a<|im_end|>b") and vocab["<|im_end|>"] in marked
    assert vocab["<|im_end|>"] not in tokenizer.encode_marked("a<|im_end|>b")


def test_facts(tokenizer: Tokenizer, checkpoint: Path) -> None:
    assert tokenizer.eos == tokenizer.find_token_id("<|im_end|>")
    assert tokenizer.vocab_size == max(tokenizer.added.values()) + 1
    assert tokenizer.get_token_bytes(10**6) == b"" and tokenizer.get_token(10**6) is None
    ids = tokenizer.encode("é日👩")
    assert b"".join(map(tokenizer.get_token_bytes, ids)).decode() == "é日👩"
    assert all(isinstance(tokenizer.get_token_bytes(t), bytes) for t in ids)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no tokenizer"):
        Tokenizer.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(StartupError, match="cannot be read"):
        Tokenizer.from_checkpoint(tmp_path)


def test_content_format(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    assert template.content_format == "openai"
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert ChatTemplate(plain, tokenizer).content_format == "string"
    assert ChatTemplate("{{ messages[0].content + 'x' }}", tokenizer).content_format == "string"


LLAVA = """{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}\
{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def test_a_template_that_walks_parts_alone_is_given_no_strings(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """It would leave them out, as the ones of LLaVA-NeXT, SmolVLM and VLM2Vec do."""
    assert ChatTemplate(LLAVA, tokenizer).part_roles == set(ROLES)
    assert ChatTemplate(LLAVA, tokenizer, "openai").part_roles == set(ROLES)
    assert template.part_roles == set() == ChatTemplate(LLAVA, tokenizer, "string").part_roles
    shown = "{% if m.role == 'user' and m.content is string %}{{ m.content }}{% endif %}{% for part"
    assert ChatTemplate(LLAVA.replace("{% for part", shown, 1), tokenizer).part_roles == {*ROLES} - {"user"}


def test_composed_special_tokens_are_noticed(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    assert template.has_all_specials_marked()
    assert not ChatTemplate("{{ '<|' + 'im_start' + '|>' }}", tokenizer).has_all_specials_marked()
    assert ChatTemplate("{{ raise_exception('no') }}", tokenizer).has_all_specials_marked()


@pytest.mark.parametrize("trim", [False, True])
def test_continue_final_message(trim: bool, tokenizer: Tokenizer, checkpoint: Path, oracle: Any) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content" + (" | trim" if trim else "")
    source += " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = ChatTemplate(source, tokenizer)
    for final in ("The answer is ", "Yes"):
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": final}]
        ours = tokenizer.encode_marked(template.render(chat, add_generation_prompt=False, continue_final_message=True))
        reference = oracle.apply_chat_template(
            chat, chat_template=source, continue_final_message=True, tokenize=True, return_dict=False
        )
        assert ours == reference
    with pytest.raises(BadRequest, match="both"):
        template.render(chat, continue_final_message=True)


def test_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    source = (
        "{{ tools | tojson }}|{{ documents[0].title }}|{{ enable_thinking }}|{{ eos_token }}|"
        "{{ strftime_now('%Y') | length }}"
        "{% generation %}|{{ messages | length }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
    )
    text = ChatTemplate(source, tokenizer).render(
        [{"role": "user", "content": "x"}],
        tools=[{"a": "<b>"}],
        documents=[{"title": "T"}],
        kwargs={"enable_thinking": False, "messages": []},
    )
    assert tokenizer.unmark(text) == '[{"a": "<b>"}]|T|False|<|im_end|>|4|1'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Only user and assistant roles are supported!') }}",
        "{% for i in range(100001) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ 9 ** 9999 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_fail_short(source: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, tokenizer, "string").render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages" and len(caught.value.message) < 200


def test_sources(checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such file"):
        read_override("missing.jinja")
    with pytest.raises(StartupError, match="not valid"):
        ChatTemplate("{% for %}", tokenizer)
    with pytest.raises(BadRequest, match="empty conversation"):
        ChatTemplate("x", tokenizer).render([])
    assert ChatTemplate.from_checkpoint(tmp_path, tokenizer) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": [{"name": "tool_use", "template": "T"}, '
                                                 '{"name": "default", "template": "D"}]}')  # fmt: skip
    template = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    assert template is not None
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat) == "D" and template.render(chat, tools=[{}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    template = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    assert template is not None and template.render(chat) == "J" and template.render(chat, chat_template="R") == "R"
