"""Small random encoders with their tokenizers: WordPiece for BERT, Unigram for XLM-RoBERTa."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fakes.checkpoints import randomise
from tests.families.pooled.pooled_case import PoolingModel, classes_of, loaded, scores_of, sentence_files
from tests.families.text_checkpoints import rename
from tests.pooling.oracle import Float64

VOCAB = 320
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=160,
)  # fmt: skip
WORDS = ("the", "a", "is", "what", "red", "circle", "where", "paris", "##s", "##ing", "##le")
LETTERS = string.ascii_lowercase + string.digits + "?.,!'"


def write_wordpiece(folder: Path) -> None:
    """Lower case, pieces of words, [CLS] and [SEP] around a text, a token type for the second of a pair."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS)]
    pieces += [f"[unused{i}]" for i in range(VOCAB - len(pieces))]
    t = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    t.normalizer = normalizers.BertNormalizer(lowercase=True)
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    t.decoder = decoders.WordPiece()
    t.add_special_tokens(special)
    t.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    _write(t, folder, {**roles, "mask_token": "[MASK]"})


def write_unigram(folder: Path) -> None:
    """SentencePiece's model of pieces with scores, as XLM-RoBERTa has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [f"▁{w}" for w in WORDS if "#" not in w]
    vocab = [(s, 0.0) for s in special] + [(w, -3.0 - i / 7) for i, w in enumerate(["▁", *words])]
    vocab += [(c, -6.0 - i / 11) for i, c in enumerate(LETTERS)]
    vocab += [(f"▁{a}{b}", -5.5 - i / 13) for i, (a, b) in enumerate(zip(LETTERS, LETTERS[3:], strict=False))]
    vocab += [(f"piece{i}", -20.0) for i in range(VOCAB - 1 - len(vocab))] + [("<mask>", 0.0)]
    t = Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Metaspace()
    t.add_special_tokens([*special, "<mask>"])
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
    _write(t, folder, {**roles, "pad_token": "<pad>", "mask_token": "<mask>"})


def _write(tokenizer: Any, folder: Path, roles: dict[str, str]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 160, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def encoder(folder: Path, kind: str, old_names: bool = False, **settings: Any) -> Path:
    """A checkpoint of one of transformers' classes; ``old_names``: norms' tensors are gamma and beta."""
    import transformers

    roberta = kind.startswith("XLMRoberta")
    config = transformers.XLMRobertaConfig if roberta else transformers.BertConfig
    sizes = {**SIZES, **({"max_position_embeddings": 162, "type_vocab_size": 1} if roberta else {}), **settings}
    model = getattr(transformers, kind)(config(**sizes))
    randomise(model, 3)
    model.eval().save_pretrained(folder)
    (write_unigram if roberta else write_wordpiece)(folder)
    if old_names:
        rename(folder, {}, (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")))
    return folder


def first_of(path: Path, ids: Sequence[int]) -> Float64:
    """The first token's hidden row, of length 1."""
    with torch.inference_mode():
        row = loaded("AutoModel", path)(input_ids=torch.tensor([ids])).last_hidden_state[0, 0].double()
    return np.asarray(row / row.norm())


def mean_of(path: Path, ids: Sequence[int]) -> Float64:
    """The mean of all rows, as it is."""
    with torch.inference_mode():
        rows = loaded("AutoModel", path)(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
    return np.asarray(rows.mean(0))


def pair_logit(path: Path, texts: tuple[str, str], **cut: Any) -> tuple[float, list[int]]:
    """The class head's value of a pair, and its ids, by transformers' tokenizer."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(path)(*texts, return_tensors="pt", return_token_type_ids=True, **cut)
    with torch.inference_mode():
        logits = loaded("AutoModelForSequenceClassification", path)(**made).logits
    return float(logits[0, 0]), made["input_ids"][0].tolist()


ENCODERS: dict[str, PoolingModel] = {
    "bge": PoolingModel(lambda f: sentence_files(encoder(f, "BertModel"), "cls_token"), first_of),
    "MiniLM, old names": PoolingModel(
        lambda f: sentence_files(
            encoder(f, "BertModel", True, num_attention_heads=2, hidden_act="gelu_new"), "mean_tokens", False
        ),
        mean_of,
    ),
    "BERT reranker": PoolingModel(
        lambda f: encoder(f, "BertForSequenceClassification", num_labels=1, layer_norm_eps=1e-3), scores_of
    ),
    "bge-m3": PoolingModel(lambda f: sentence_files(encoder(f, "XLMRobertaModel"), "cls_token"), first_of),
    "bge-reranker": PoolingModel(
        lambda f: encoder(f, "XLMRobertaForSequenceClassification", num_labels=1, num_attention_heads=2), scores_of
    ),
    "XLM-RoBERTa classes": PoolingModel(
        lambda f: encoder(f, "XLMRobertaForSequenceClassification", num_labels=3, hidden_act="relu"), classes_of
    ),
}
