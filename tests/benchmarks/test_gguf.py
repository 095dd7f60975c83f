"""GGUF files that the benchmark writes for llama.cpp: what they hold, and that it computes the checkpoint's model."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import gguf, llamacpp, openvino_peer
from benchmarks.harness.checkpoints import TINY, config, sizes
from benchmarks.harness.peer_process import PeerMissing, PeerProcess
from benchmarks.harness.server import VLLM_CORES, vllm_variables
from benchmarks.quantised import Sizes as Lengths
from benchmarks.quantised import peer_report, peers_of
from benchmarks.serve import describe_cores

pytestmark = pytest.mark.part("quantised")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny shape, without a tokenizer."""
    path, generator = tmp_path_factory.mktemp("tiny"), torch.Generator().manual_seed(7)
    made = {name: torch.randn(shape, generator=generator) * 0.06 for name, shape in sizes(TINY)}
    made = {name: t + 1 if "norm" in name else t for name, t in made.items()}
    save_file(made, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(config(TINY)))
    return path


def read(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    """(keys, tensors as (dimensions, type, bytes)) of a file whose keys are numbers and strings."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> Any:
        nonlocal at
        found = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return found if len(found) > 1 else found[0]

    def text() -> str:
        return str(take(f"{take('Q')}s").decode())

    assert take("4s") == b"GGUF" and take("I") == 3
    tensors, keys = take("QQ")
    values = {text(): {4: lambda: take("I"), 6: lambda: take("f"), 8: text}[take("I")]() for _ in range(keys)}
    places = []
    for _ in range(tensors):
        name, dims = text(), take("I")
        shape = tuple(take("Q") for _ in range(dims))
        places.append((name, shape, take("I"), take("Q")))
    at += -at % 32
    found = {}
    for name, shape, kind, start in places:
        assert start % 32 == 0
        count = int(np.prod(shape))
        size = {0: 4 * count, 8: count // 32 * 34, 2: count // 32 * 18}[kind]
        found[name] = shape, kind, data[at + start : at + start + size]
        assert len(found[name][2]) == size
    return values, found


def decoded(kind: int, raw: bytes) -> np.ndarray[Any, Any]:
    """What blocks stand for, byte by byte as the format says."""
    values: list[float] = []
    for start in range(0, len(raw), 34 if kind == gguf.Q8_0 else 18):
        scale = float(np.frombuffer(raw, "<f2", 1, start)[0])
        body = raw[start + 2 : start + (34 if kind == gguf.Q8_0 else 18)]
        if kind == gguf.Q8_0:
            values += [scale * (b - 256 if b > 127 else b) for b in body]
        else:
            values += [scale * ((b & 15) - 8) for b in body] + [scale * ((b >> 4) - 8) for b in body]
    return np.array(values, np.float32)


@pytest.mark.parametrize(("form", "steps"), [("Q8_0", 0.6 / 127), ("Q4_0", 1.1 / 8)])
def test_a_file_holds_the_text_model_in_blocks(form: str, steps: float, source: Path, tmp_path: Path) -> None:
    """Every tensor of the text model and no other; each value within half a step (Q4_0's largest may lose a whole)."""
    keys, tensors = read(gguf.written(source, tmp_path / "a.gguf", llamacpp.FORMS[form]))
    assert keys["general.architecture"] == "qwen2" and keys["tokenizer.ggml.model"] == "no_vocab"
    assert (keys["qwen2.block_count"], keys["qwen2.attention.head_count_kv"], keys["qwen2.vocab_size"]) == (2, 2, 1024)
    stored = {gguf._name(n): t for n, t in load_file(str(source / "model.safetensors")).items() if gguf._name(n)}
    assert set(stored) == set(tensors) and len(stored) == 2 + 2 * 12
    for name, (shape, kind, raw) in tensors.items():
        want = stored[name].numpy()
        assert shape == want.shape[::-1] and kind == (gguf.F32 if want.ndim == 1 else llamacpp.FORMS[form])
        if kind == gguf.F32:
            assert np.array_equal(np.frombuffer(raw, "<f4"), want)
        else:
            got = decoded(kind, raw[: 4 * 34 * 18])
            blocks = want.reshape(-1)[: len(got)]
            most = np.abs(blocks.reshape(-1, 32)).max(1).repeat(32)
            assert (np.abs(got - blocks) <= steps * most + 1e-6).all(), name


def test_a_python_without_llamacpp_is_unproven(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(llamacpp, "BENCH", tmp_path)
    monkeypatch.setattr(llamacpp, "checkpoint", lambda shape: source)
    for python, part in ((sys.executable, "No module named 'llama_cpp'"), (str(tmp_path / "none"), "No such file")):
        peers, why = peers_of("llamacpp", python, "tiny", 1, Lengths())
        assert not peers and part in why
        assert peer_report("llamacpp", {}, peers, why).startswith("llama.cpp: unproven (")
    assert "no --peer" in peer_report("", {}, *peers_of("", "", "tiny", 1, Lengths()))


def test_a_python_without_openvino_is_unproven(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(openvino_peer, "BENCH", tmp_path)
    monkeypatch.setattr(openvino_peer, "checkpoint", lambda shape: source)
    peers, why = peers_of("openvino", str(tmp_path / "python"), "tiny", 1, Lengths())
    assert not peers and "optimum-cli: No such file" in why and openvino_peer.NEEDS in why
    assert peer_report("openvino", {}, peers, why).startswith("OpenVINO GenAI: unproven (")
    (tmp_path / "optimum-cli").write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    (tmp_path / "optimum-cli").chmod(0o755)
    _, why = peers_of("openvino", str(tmp_path / "python"), "tiny", 1, Lengths())
    assert "the export: it ended with status 3: no such model" in why


def test_a_peer_that_dies_says_by_which_signal() -> None:
    dies = "import os, sys; print('loading', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    with pytest.raises(PeerMissing, match=r"it died by SIGSEGV after 'loading'; on a CPU with AMX .*GGML_AMX_INT8=OFF"):
        PeerProcess([sys.executable, "-c", dies], llamacpp.HINTS)
    answers = 'print(\'noise\'); print(\'{"start": 1, "version": "2"}\', flush=True); input(); raise SystemExit(4)'
    peer = PeerProcess([sys.executable, "-c", answers])
    assert (peer.start, peer.version) == (1.0, "2")
    with pytest.raises(PeerMissing, match="it ended with status 4"):
        peer.ask(prompt=[1])


def test_vllm_computes_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_CORES, raising=False)
    assert vllm_variables() == {VLLM_CORES: "0"} and "all cores but 0" in describe_cores()
    monkeypatch.setenv(VLLM_CORES, "1")
    assert vllm_variables() == {VLLM_CORES: "1"} and "all cores but 1" in describe_cores()


@pytest.mark.long
def test_the_gguf_package_reads_it(source: Path, tmp_path: Path) -> None:
    """The format's own library, where it is installed."""
    library: Any = pytest.importorskip("gguf", reason="gguf is not installed")
    quants: Any = importlib.import_module("gguf.quants")
    for form, kind in llamacpp.FORMS.items():
        path = gguf.written(source, tmp_path / f"{form}.gguf", kind)
        for tensor in library.GGUFReader(path).tensors:
            if tensor.tensor_type.name == form:
                got = quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
                assert np.array_equal(got, decoded(kind, tensor.data.tobytes())), tensor.name


@pytest.mark.long
def test_llamacpp_computes_the_same_model(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    """Logits of transformers' model and of llama.cpp, run by the Python that TRENCADIS_TEST_LLAMACPP names."""
    python = os.environ.get("TRENCADIS_TEST_LLAMACPP", "")
    if not python:
        pytest.skip("TRENCADIS_TEST_LLAMACPP names no Python that has llama-cpp-python")
    import transformers

    monkeypatch.setattr(llamacpp, "BENCH", tmp_path)
    monkeypatch.setattr(llamacpp, "checkpoint", lambda shape: source)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    ids = llamacpp.ids(40, 1)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
    for form, least in (("Q8_0", 0.999), ("Q4_0", 0.9)):
        peer = llamacpp.LlamaCpp(python, form, "tiny", 1, 128)
        got = np.array(peer.ask(prompt=ids, logits=True)["logits"], np.float32)
        peer.close()
        cosine = float(got @ want / np.linalg.norm(got) / np.linalg.norm(want))
        print(f"{form}: cosine of logits {cosine:.5f}")
        assert cosine >= least
