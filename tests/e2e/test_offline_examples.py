"""The programs of examples/offline, by the bundled demo."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "offline"


def ran(name: str) -> Any:
    """What ``main`` of the program returns."""
    spec = importlib.util.spec_from_file_location(f"offline_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


def test_an_image_in_a_conversation_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("chat_with_image") == "A red circle."
    assert "prompt tokens are the image's" in capsys.readouterr().out


def test_an_answer_obeys_the_schema() -> None:
    answer = ran("json_schema")
    assert answer["colour"] in ("red", "green", "blue") and answer["sides"] <= 9 and len(answer) == 2


def test_four_beams_are_distinguished() -> None:
    found = ran("beam_search")
    assert len(set(found)) == 4 and all(text.startswith("The picture shows") for text in found)


def test_the_document_about_a_circle_scores_best() -> None:
    width, scores = ran("embed_and_score")
    assert width > 16 and len(scores) == 3 and scores[0] == max(scores)


def test_two_answers_stream() -> None:
    assert all(ran("stream"))


def test_two_adapters_and_the_base_answer_in_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ran("many_adapters")
    assert len(texts) == 6 and all(len({*texts[at : at + 3]}) == 3 for at in (0, 3))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["base", "lora-1", "lora-2"] * 2


def test_every_program_is_run_here_and_listed() -> None:
    names = {p.stem for p in FOLDER.glob("*.py")}
    here = Path(__file__).read_text()
    readme = (FOLDER / "README.md").read_text()
    assert all(f'ran("{name}")' in here and f"`{name}.py`" in readme for name in names)
