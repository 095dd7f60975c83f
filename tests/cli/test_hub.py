"""Hub ids: what counts as one, what is fetched of a repository, what the line says where that is of no use."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from trencadis.assets import demo_path
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.engine_args import resolve_local_model
from trencadis.server.cli import serve
from trencadis.server.config import model_download
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

LLAMA = ["config.json", "tokenizer.model", "tokenizer_config.json", "model.safetensors", "chat_template.jinja",
         "model.safetensors.index.json", "consolidated.safetensors", "original/consolidated.00.safetensors",
         "original/params.json", "onnx/config.json", "pytorch_model.bin", "modeling.py", "README.md"]  # fmt: skip


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Makes the hub hold one repository; the list holds (id, files fetched) of each download."""
    calls = []

    def make(architecture, files=LLAMA):
        def snapshot(model, *, revision, token, cache_dir, allow_patterns, ignore_patterns, local_files_only):
            wanted = list(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
            calls.append((model, wanted))
            folder = tmp_path / "snapshots"
            folder.mkdir(exist_ok=True)
            for name in wanted:
                (folder / name).write_text(json.dumps({"architectures": [architecture]}))
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.chdir(tmp_path)
        return calls

    return make


def test_a_bare_name_is_a_hub_id_and_an_architecture_is_refused_before_its_weights_come(repository):
    calls = repository("T5ForConditionalGeneration")
    with pytest.raises(
        StartupError, match=r"^gpt2 holds T5ForConditionalGeneration \(architectures\); supported: .Qwen2_5_VL"
    ):
        model_download.find_model_folder(EngineConfig("gpt2"))
    assert calls == [("gpt2", ["config.json"])]


def test_the_sentencepiece_model_comes_along_and_no_code(repository, monkeypatch):
    calls = repository("LlamaForCausalLM")
    monkeypatch.setattr(model_download, "load_config", lambda path, overrides: None)
    model_download.find_model_folder(EngineConfig("owner/name"))
    assert "tokenizer.model" in calls[-1][1] and "model.safetensors" in calls[-1][1]
    assert not {"pytorch_model.bin", "modeling.py", "consolidated.safetensors"} & set(calls[-1][1])
    assert not any("/" in name for name in calls[-1][1]), "a second copy of the model"


OPT = ["config.json", "vocab.json", "pytorch_model.bin", "pytorch_model.fp32.bin", "flax_model.msgpack", "tf_model.h5",
       "training_args.bin", "rust_model.ot"]  # fmt: skip
SHARDED = ["config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin",
           "pytorch_model-00002-of-00002.bin", "optimizer.bin", "original/pytorch_model.bin"]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "load_format", "fetched"),
    [
        (OPT, "auto", {"pytorch_model.bin"}),
        (SHARDED, "auto", {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"}),
        (OPT, "safetensors", set()),
        (OPT, "dummy", set()),
        (LLAMA, "auto", {"model.safetensors"}),
        (LLAMA, "pt", {"pytorch_model.bin"}),
    ],
)
def test_weights_of_torch_are_fetched_where_there_are_no_others(
    repository, monkeypatch, tmp_path, files, load_format, fetched
):
    repository("OPTForCausalLM", files)
    monkeypatch.setattr(model_download, "load_config", lambda path, overrides: None)
    folder = model_download.find_model_folder(EngineConfig("facebook/opt-125m", load_format=load_format))
    assert {p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors")} == fetched
    assert {p.name for p in folder.iterdir() if p.suffix == ".json"} >= {n for n in files if n.endswith(".index.json")}


def test_a_tokenizer_of_its_own_comes_without_weights(repository, tmp_path):
    calls = repository("GPT2LMHeadModel")
    made = serve.find_model(Settings(EngineConfig(str(tmp_path), tokenizer="gpt2"), ServerConfig(), {}, []))
    assert made.engine.tokenizer == str(tmp_path / "snapshots")
    assert made.model_root == str(tmp_path) and made.server.served_model_name == [str(tmp_path)]
    [(name, files)] = calls
    assert name == "gpt2" and "tokenizer.model" in files and "model.safetensors" not in files


def test_a_model_is_listed_by_the_id_that_was_given_and_not_by_the_folder_of_the_cache(
    repository, tmp_path, monkeypatch
):
    repository("LlamaForCausalLM")
    monkeypatch.setattr(model_download, "load_config", lambda path, overrides: None)
    made = serve.find_model(Settings(EngineConfig("owner/name"), ServerConfig(served_model_name=["m"]), {}, []))
    assert made.engine.model == str(tmp_path / "snapshots") and made.model_root == "owner/name"
    assert serve.find_model(Settings(EngineConfig(""), ServerConfig(), {}, [])).model_root == str(demo_path())


def test_a_tokenizer_is_looked_up_beside_the_demo_as_well(repository, tmp_path):
    calls = repository("LlamaForCausalLM")
    for found in (
        serve.find_model(Settings(EngineConfig("", tokenizer="owner/name"), ServerConfig(), {}, [])).engine,
        resolve_local_model(EngineConfig("", tokenizer="owner/name")),
    ):
        assert found.tokenizer == str(tmp_path / "snapshots") and found.model == str(demo_path())
    assert [name for name, _ in calls] == ["owner/name", "owner/name"]


@pytest.mark.parametrize("model", ["a/b/c", "./gpt2", "~/gpt2", "-gpt2", "gp t2", "owner/", "/name", "a--b", "a..b"])
def test_what_is_no_hub_id_never_reaches_the_hub(repository, model):
    calls = repository("GPT2LMHeadModel")
    with pytest.raises(StartupError, match="There is no model folder"):
        model_download.resolve(model)
    assert not calls


def test_offline_a_bare_name_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError) as caught:
        model_download.find_model_folder(EngineConfig("gpt2", download_dir=str(tmp_path)))
    assert str(caught.value) == "There is no folder gpt2 here, HF_HUB_OFFLINE is set, and its cache lacks this model."


def test_a_sentencepiece_model_alone_says_what_it_takes(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(StartupError) as caught:
        Tokenizer.from_checkpoint(tmp_path)
    line = str(caught.value)
    assert "tokenizer.model" in line and "sentencepiece" in line and "--tokenizer" in line and "\n" not in line
