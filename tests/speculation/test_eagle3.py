"""A head of EAGLE-3 drafts: it equals a plain reference, and answers are those without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.fakes.checkpoints import VOCAB
from tests.speculation.test_cpu_answers import engine_of, run
from tests.traffic.requests import pixels
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine.engine import Engine
from trencadis.core.errors import StartupError
from trencadis.core.media_spans import MediaSpan
from trencadis.core.models.eagle3 import FROM_TARGET
from trencadis.core.request import Request, SamplingParams
from trencadis.core.spec import draft_checkpoint

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, KEYS, SIZE, INNER, DRAFTS = 64, 4, 2, 16, 96, 200
TAPS = (0, 1, 1)
TABLE = "model.embed_tokens.weight"
ALONE: dict[str, Any] = {"max_model_len": 384, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 32}


def weights_of(seed: int, own_table: bool = False, size: int = SIZE) -> dict[str, Tensor]:
    """Random tensors of a head whose drafts are every id up to DRAFTS, shifted by their number."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return 1 + 0.2 * values if len(shape) == 1 else 0.1 * values

    made = {
        "fc.weight": random(HIDDEN, len(TAPS) * HIDDEN), "norm.weight": random(HIDDEN),
        "lm_head.weight": random(DRAFTS, HIDDEN), "d2t": torch.arange(DRAFTS) % 7,
        "midlayer.input_layernorm.weight": random(HIDDEN), "midlayer.hidden_norm.weight": random(HIDDEN),
        "midlayer.post_attention_layernorm.weight": random(HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(HEADS * size, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(KEYS * size, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(KEYS * size, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * size),
        "midlayer.mlp.gate_proj.weight": random(INNER, HIDDEN), "midlayer.mlp.up_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INNER),
    }  # fmt: skip
    if own_table:
        made["embed_tokens.weight"] = random(VOCAB, HIDDEN)
    return made


def head_at(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    """Writes a head in the hub's layout."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS, "head_dim": SIZE, "intermediate_size": INNER, "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_hidden_layers": 1,
        "max_position_embeddings": 2048, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
        "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "model_type": "llama",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(weights, folder / "model.safetensors")
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class PlainHead:
    """The head in plain torch, over a whole text at a time.

    ``norm_first``: the residual stream begins with the normed state. ``section``: how many of a key's frequencies each
    of the three positions of a token turns; None: all have one position, its place in the text.
    """

    def __init__(
        self, weights: dict[str, Tensor], table: Tensor, size: int = SIZE, norm_first: bool = False,
        section: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self.w, self.size, self.norm_first, self.section = weights, size, norm_first, section
        self.table = weights.get("embed_tokens.weight", table)

    def states(self, hidden: Tensor, tokens: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed, stream) [n, hidden] of tokens whose following ids are ``tokens``; ``positions``: [3, n]."""
        w, n, d = self.w, len(tokens), self.size
        embedded = norm(self.table[tokens], w["midlayer.input_layernorm.weight"])
        normed = norm(hidden, w["midlayer.hidden_norm.weight"])
        x = torch.cat([embedded, normed], 1)
        q, k, v = ((x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(n, -1, d) for name in "qkv")
        angle = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)[None]
        if positions is not None and self.section is not None:
            one = [positions[axis].repeat(count, 1) for axis, count in enumerate(self.section)]
            angle = torch.cat(one).T * 10000.0 ** (-torch.arange(0, d, 2) / d)[None]
        cos, sin = (torch.cat([f(angle), f(angle)], 1)[:, None] for f in (torch.cos, torch.sin))

        def turned(t: Tensor) -> Tensor:
            return t * cos + torch.cat([-t[..., d // 2 :], t[..., : d // 2]], -1) * sin

        q, k = turned(q), turned(k).repeat_interleave(HEADS // KEYS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(HEADS // KEYS, 1)).reshape(n, -1)
        x = (normed if self.norm_first else hidden) + out @ w["midlayer.self_attn.o_proj.weight"].T
        y = norm(x, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        stream = x + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        return norm(stream, w["norm.weight"]), stream

    def drafts(self, taps: Tensor, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """``count`` drafts after ``tokens``, whose states are ``taps`` but for the last one's; the first's states."""
        hidden = taps @ self.w["fc.weight"].T
        ids, found, first = torch.tensor(tokens[1:]), [], None
        for _ in range(count):
            normed, stream = self.states(hidden, ids)
            first = normed if first is None else first
            best = int((normed[-1] @ self.w["lm_head.weight"].T).argmax())
            token = best + int(self.w["d2t"][best])
            found.append(token)
            hidden, ids = torch.cat([hidden, stream[-1:]]), torch.cat([ids, torch.tensor([token])])
        assert first is not None
        return found, first


def headed(path: Path, head: Path, drafts: int = 4, **flags: Any) -> Engine:
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}
    return engine_of(path, speculative_config=asked, spec_always=True, **flags)


def states_of(path: Path, tokens: list[int], taps: tuple[int, ...] = TAPS) -> tuple[Tensor, Tensor]:
    """(tapped states [n, 3 x hidden], embedding table) by transformers."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[at][0] for at in taps], 1), model.get_input_embeddings().weight.detach()


def on_device(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Flags of a start on the CPU, the twin of an NVIDIA card, or the emulated Gaudi in lazy or compile mode."""
    planned = {"batch_invariant": False, "max_num_seqs": 1, "warmup": "skip", "block_size": 16}
    if device == "cpu":
        return {}
    if device == "twin":
        return {"device": "cuda", "policy": "twin", **planned}
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1" if device == "lazy" else "0")
    return {"device": "hpu", **planned}


@pytest.mark.parametrize(
    ("device", "own_table"),
    [
        ("cpu", False), ("cpu", True), ("twin", False),
        *(pytest.param(device, True, marks=pytest.mark.long) for device in ("twin", "lazy", "compiled")),
    ],
)  # fmt: skip
def test_a_head_equals_a_plain_reference(
    device: str, own_table: bool, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states within 1e-4, and its drafts, over a prompt in chunks and steps that reject drafts."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    path, weights = checkpoint("qwen2"), weights_of(3, own_table)
    engine = headed(path, head_at(tmp_path / "head", weights), **{**ALONE, **on_device(device, monkeypatch)})
    compare_drafts(engine, path, lambda table: PlainHead(weights, table))


def compare_drafts(
    engine: Engine, path: Path, plain: Callable[[Tensor], PlainHead], taps: tuple[int, ...] = TAPS
) -> None:
    """Asserts that all drafts beside an answer of ``engine`` are those of ``plain``, made of the embedding table."""
    rank: Any = engine.executor._rank  # type: ignore[attr-defined]
    seen: list[tuple[list[int], tuple[int, ...], Tensor]] = []
    propose = rank.eagle.propose

    def noted(rows: Any) -> Any:
        (seq,) = engine.scheduler.running
        at = rank.eagle._rows.get(seq.key)
        state = rank.eagle.head.state.normed.cpu()[at].clone() if at else torch.zeros(0)
        found = propose(rows)
        seen.append((list(seq.tokens), found[0], state))
        return found

    rank.eagle.propose = noted
    prompt = [(7 * at) % 300 for at in range(75)]
    engine.add(Request("r", prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)))
    while not engine.idle():
        engine.step()
    engine.close()
    assert len(seen) > 5
    for tokens, drafts, state in seen:
        states, table = states_of(path, tokens[:-1], taps)
        wanted, normed = plain(table).drafts(states, tokens, len(drafts))
        torch.testing.assert_close(state, normed[-1], rtol=1e-4, atol=1e-4)
        assert drafts == tuple(wanted)


def test_heads_whose_keys_have_112_values(checkpoint: Any, tmp_path: Path) -> None:
    path, weights = checkpoint("qwen2"), weights_of(4, size=112)
    engine = headed(path, head_at(tmp_path / "head", weights, head_dim=112), **ALONE)
    compare_drafts(engine, path, lambda table: PlainHead(weights, table, 112))


def test_heads_that_begin_with_the_normed_state(checkpoint: Any, tmp_path: Path) -> None:
    path, weights = checkpoint("qwen2"), weights_of(5)
    engine = headed(path, head_at(tmp_path / "head", weights, norm_before_residual=True), **ALONE)
    compare_drafts(engine, path, lambda table: PlainHead(weights, table, norm_first=True))


def test_a_head_that_names_no_layers_reads_one_near_each_end_and_the_middle(checkpoint: Any, tmp_path: Path) -> None:
    """The other spelling of the architecture, and the size of the target's states."""
    path, weights = checkpoint("qwen2", num_hidden_layers=7), weights_of(6)
    head = head_at(
        tmp_path / "head", weights, architectures=["Eagle3LlamaForCausalLM"], eagle_config=None,
        target_hidden_size=HIDDEN,
    )  # fmt: skip
    compare_drafts(headed(path, head, **ALONE), path, lambda table: PlainHead(weights, table), (2, 3, 4))


def positions_of(tokens: int, offset: int, height: int, width: int) -> Tensor:
    """[3, tokens]: positions of a text whose image of height x width tokens begins at ``offset``."""
    before = torch.arange(offset).repeat(3, 1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = offset + torch.stack([torch.zeros_like(rows), rows, columns]).view(3, -1)
    after = offset + max(height, width) + torch.arange(tokens - offset - height * width)
    return torch.cat([before, image, after.repeat(3, 1)], 1)


@pytest.mark.parametrize("size", [16, 112])
def test_a_head_of_qwen2_5_vl_turns_keys_by_the_three_positions_of_an_image(
    size: int, vl_checkpoint: Path, tmp_path: Path
) -> None:
    """Its sections are its own; the states are those that the target's launch left for it."""
    section = (2, 3, 3) if size == 16 else (16, 20, 20)
    weights, offset, height, width = weights_of(7, size=size), 5, 3, 4
    head = head_at(
        tmp_path / "head", weights, architectures=["Eagle3Qwen2_5vlForCausalLM"], head_dim=size,
        rope_scaling={"type": "mrope", "mrope_section": list(section)},
    )  # fmt: skip
    engine = headed(vl_checkpoint, head, **{**ALONE, "max_num_batched_tokens": 64})
    rank: Any = engine.executor._rank  # type: ignore[attr-defined]
    pad = load_config(vl_checkpoint).image_token
    prompt = [*range(30, 30 + offset), *[pad] * (height * width), *range(50, 60)]
    at = positions_of(len(prompt) + 4, offset, height, width)
    found, propose = list[tuple[list[int], tuple[int, ...], Tensor]](), rank.eagle.propose

    def noted(rows: Any) -> Any:
        (seq,) = engine.scheduler.running
        states = rank.eagle.head.state.states[FROM_TARGET + 1 :][: len(prompt)].clone()
        drafts = propose(rows)
        found.append((list(seq.tokens), drafts[0], states))
        return drafts

    rank.eagle.propose = noted
    span = MediaSpan(offset, height * width, "06080001", (1, 2 * height, 2 * width), 64)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    positions = at[:, : len(prompt)].int().numpy().tobytes()
    engine.add(Request("r", prompt, params, [span], positions, max(height, width) - height * width))
    while not engine.idle():
        engine.step()
        for request_id, index in engine.needs():
            engine.add_media(request_id, index, pixels(span))
    engine.close()
    tokens, drafts, hidden = found[0]
    plain = PlainHead(weights, load_file(vl_checkpoint / "model.safetensors")[TABLE], size, section=section)
    ids = torch.tensor(tokens[1:])
    assert len(ids) == len(prompt) and hidden.abs().sum(1).min() > 0
    for draft in drafts:
        normed, stream = plain.states(hidden, ids, at[:, : len(ids)])
        best = int((normed[-1] @ weights["lm_head.weight"].T).argmax())
        assert draft == best + int(weights["d2t"][best])
        hidden, ids = torch.cat([hidden, stream[-1:]]), torch.cat([ids, torch.tensor([draft])])
    flat = PlainHead(weights, plain.table, size).states(hidden, ids)[0]
    assert (flat[-1] - plain.states(hidden, ids, at[:, : len(ids)])[0][-1]).abs().max() > 1e-2, "positions matter"


def counting_model(path: Path, folder: Path) -> tuple[Path, Tensor]:
    """(a copy of a checkpoint whose layers add nothing and which continues every id by the next one, its embeddings).

    Embeddings have 1 in the first column, and a vector of length 1 of their own in the KEYS x SIZE next ones.
    """
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    own = functional.normalize(torch.randn((VOCAB, KEYS * SIZE), generator=torch.Generator().manual_seed(6)))
    table = functional.pad(own, (1, HIDDEN - 1 - KEYS * SIZE))
    tensors["lm_head.weight"] = table.roll(1, 0)
    table[:, 0] = 1
    tensors["model.embed_tokens.weight"], tensors["model.norm.weight"] = table.clone(), torch.ones(HIDDEN)
    save_file(tensors, file)
    return folder, table


def counting_head(folder: Path, table: Tensor, reads: str) -> Path:
    """A head that continues texts of ``counting_model``: by the model's hidden states, or by its token's embedding.

    In the latter case its attention, whose queries and keys are constant but for the rotation, reads its own token, and
    subtracts the state that the draft before it left: normed, an embedding is sqrt(32) long, and a state 8.
    """
    weights = {
        name: torch.ones_like(t) if t.dim() == 1 else 0 * t for name, t in weights_of(1).items() if name != "d2t"
    }
    apart = functional.pad(table[:, 1:], (1, 0))
    if reads == "states":
        weights["fc.weight"] = torch.eye(HIDDEN, len(TAPS) * HIDDEN)
    else:
        for name in "qk":
            weights[f"midlayer.self_attn.{name}_proj.weight"].view(-1, SIZE, 2 * HIDDEN)[:, : SIZE // 2, 0] = 3
        embedded, state = weights["midlayer.self_attn.v_proj.weight"].split(HIDDEN, 1)
        embedded[:, 1:], state[:, 1:] = (
            torch.eye(KEYS * SIZE, HIDDEN - 1),
            -(0.5**0.5) * torch.eye(KEYS * SIZE, HIDDEN - 1),
        )
        read = torch.eye(KEYS * SIZE).view(-1, KEYS, 1, SIZE).repeat(1, 1, HEADS // KEYS, 1)
        weights["midlayer.self_attn.o_proj.weight"][1 : 1 + KEYS * SIZE] = read.reshape(-1, HEADS * SIZE)
    weights["lm_head.weight"] = apart.roll(2 if reads == "states" else 1, 0)
    return head_at(folder, weights, draft_vocab_size=VOCAB)


@pytest.mark.parametrize(("reads", "drafts"), [("states", 1), ("embeddings", 3)])
@pytest.mark.parametrize(
    "device", ["cpu", "twin", *(pytest.param(d, marks=pytest.mark.long) for d in ("lazy", "compiled"))]
)
def test_right_drafts_of_a_head_are_accepted(
    device: str, reads: str, drafts: int, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in steps of two rows: they come from the states of the right rows, and from the drafts before."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    path, table = counting_model(checkpoint("qwen2", tie_word_embeddings=False), tmp_path / "model")
    head = counting_head(tmp_path / "head", table, reads)
    engine = headed(path, head, drafts, **{**ALONE, **on_device(device, monkeypatch), "max_num_seqs": 2})
    prompts = {f"r{number}": [(37 * number + 11 * at) % 300 for at in range(9 + 20 * number)] for number in range(3)}
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)))
    found: dict[str, list[int]] = {name: [] for name in prompts}
    while not engine.idle():
        for delta in engine.step():
            found[delta.id] += delta.tokens
    totals = engine.scheduler.totals
    engine.close()
    assert found == {name: [(prompt[-1] + 1 + at) % VOCAB for at in range(24)] for name, prompt in prompts.items()}
    assert totals.spec_accepted == totals.spec_draft_tokens > 30


@pytest.mark.parametrize(("drafts", "flags"), [(3, {"async_depth": 1}), (4, {"enable_prefix_caching": False})])
def test_a_wrong_head_changes_no_answer(drafts: int, flags: Any, vl_checkpoint: Path, tmp_path: Path) -> None:
    plain = run(engine_of(vl_checkpoint, speculation=False), 3, 14)
    engine = headed(vl_checkpoint, head_at(tmp_path / "head", weights_of(1)), drafts, **flags)
    found = run(engine, 3, 14)
    assert (found.tokens, found.scores, found.ended) == (plain.tokens, plain.scores, plain.ended)
    assert engine.scheduler.totals.spec_draft_tokens > 20


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_a_start_reads_a_heads_configuration_once(
    device: str, vl_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    read, load = list[str](), draft_checkpoint.load_eagle_config
    monkeypatch.setattr(
        draft_checkpoint, "load_eagle_config", lambda *args: read.append(args[1]) or load(*args)
    )  # fmt: skip
    head = head_at(tmp_path / "head", weights_of(1))
    headed(vl_checkpoint, head, 2, **{**ALONE, **on_device(device, monkeypatch)}).close()
    assert read == [str(head)]


def test_what_is_no_head_is_refused_in_one_line(vl_checkpoint: Path, tmp_path: Path) -> None:
    weights = weights_of(1)
    far = {**weights, "d2t": torch.full((DRAFTS,), VOCAB)}
    without = {name: t for name, t in weights.items() if name != "fc.weight"}
    other = {**weights, "lm_head.weight": torch.zeros(DRAFTS + 1, HIDDEN)}
    cases: list[tuple[Path, str]] = [
        (head_at(tmp_path / "a", weights, hidden_size=32, head_dim=8), "is a head for hidden size 32"),
        (head_at(tmp_path / "t", weights, target_hidden_size=128), "is a head for hidden size 128"),
        (head_at(tmp_path / "b", weights, vocab_size=VOCAB + 8), "has 352 ids and"),
        (head_at(tmp_path / "c", weights, architectures=["LlamaForCausalLM"]), "eagle3 takes a head"),
        (head_at(tmp_path / "d", far), "outside of 344 ids"),
        (head_at(tmp_path / "e", without), "the head has no tensor fc.weight"),
        (head_at(tmp_path / "f", other), "lm_head.weight has shape [201, 64], not [200, 64]"),
        (tmp_path / "g", "is no folder of a head"),
        (head_at(tmp_path / "h", weights, draft_vocab_size=VOCAB + 1), "draft_vocab_size must be a whole number"),
    ]  # fmt: skip
    cut = head_at(tmp_path / "i", weights) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    cases.append((cut.parent, "model.safetensors"))
    for head, words in cases:
        with pytest.raises(StartupError) as error:
            headed(vl_checkpoint, head)
        assert words in str(error.value) and "\n" not in str(error.value), (head, error.value)


@pytest.mark.long
def test_a_head_trained_on_the_demo_is_accepted(tmp_path: Path) -> None:
    """In under ten minutes; it gives at least 1.5 tokens a verified step on questions that it has not seen."""
    command = [sys.executable, str(ROOT / "tools" / "train_head.py"), "--out", str(tmp_path), "--minutes", "6"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    print(told)
    assert float(told.splitlines()[-1].split()[0]) >= 1.5
