"""Paths and data URLs that a stranger may send."""

import asyncio
import base64
import os
import tracemalloc

import pytest

from tests.hostile.refusals import PARAM, refusal
from trencadis.multimodal.sources.media_loader import MediaLoader, _read_without_links


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "media-evil").mkdir()
    (tmp_path / "media-evil" / "x").write_bytes(b"outside")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "a b.png")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "fifo")
    return root


def test_files_under_the_folder_are_read(tree):
    loader = MediaLoader(allowed_local_path=tree)
    for path in ("a%20b.png", "sub/../a b.png", "in", "./a%20b.png", "sub/%2e%2e/a%20b.png"):
        for host in ("", "localhost"):
            assert asyncio.run(loader.load(f"file://{host}{tree}/{path}", PARAM)) == b"inside"
    linked = tree.parent / "link"
    linked.symlink_to(tree)
    assert asyncio.run(MediaLoader(allowed_local_path=linked).load(f"file://{linked}/in", PARAM)) == b"inside"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("../secret", 403), ("sub/../../secret", 403), ("%2e%2e/secret", 403), ("..%2fsecret", 403), ("out", 403),
        ("up/secret", 403), ("up/media/../secret", 403), ("../media-evil/x", 403), ("../missing", 403), ("loop", 403),
        ("/../../../../../../../etc/passwd", 403), ("missing", 422), ("sub", 422), ("", 422), ("fifo", 422),
        ("a b.png/x", 422), ("a%00b", 400), ("in?x", 400),
    ],
)  # fmt: skip
def test_paths_outside_and_odd_files(tree, path, status):
    refusal(MediaLoader(allowed_local_path=tree), f"file://{tree}/{path}", status, str(tree), "secret")


def test_files_of_other_hosts_or_without_permission(tree):
    refusal(MediaLoader(allowed_local_path=tree), f"file://evil{tree}/in", 400, "evil")
    refusal(MediaLoader(allowed_local_path=tree), "file:in", 400)
    refusal(MediaLoader(), f"file://{tree}/in", 403, str(tree))
    refusal(MediaLoader(allowed_local_path=tree / "none"), f"file://{tree}/in", 403, str(tree))


def test_large_files(tree):
    (tree / "big").write_bytes(bytes(1001))
    assert len(asyncio.run(MediaLoader((), tree, 1001).load(f"file://{tree}/big", PARAM))) == 1001
    refusal(MediaLoader((), tree, 1000), f"file://{tree}/big", 413, str(tree))


@pytest.mark.parametrize("parts", [("out",), ("up", "secret")])
def test_a_link_put_there_after_the_check_is_not_followed(tree, parts):
    with pytest.raises(OSError):
        _read_without_links(tree, parts, 100)


def data(text, label="image/png;base64"):
    return f"data:{label},{text}"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 1000, 3 << 20, (3 << 20) + 1])
def test_base64_is_decoded(size):
    raw = os.urandom(size)
    text = base64.b64encode(raw).decode()
    loader = MediaLoader()
    assert asyncio.run(loader.load(data(text), PARAM)) == raw
    assert asyncio.run(loader.load(data(text, "application/octet-stream;charset=utf-8;BASE64"), PARAM)) == raw
    assert asyncio.run(loader.load(data(text, ";base64"), PARAM)) == raw
    wrapped = "\r\n ".join(text[i : i + 76] for i in range(0, len(text), 76))
    assert asyncio.run(loader.load(data(wrapped), PARAM)) == raw


@pytest.mark.parametrize(
    "url",
    [
        data("QUJ"), data("QQ"), data("QQ="), data("QQ==="), data("QQ==QQ=="), data("Q=Q="), data("===="), data("=QQQ"),
        data("QU-_"), data("QUJ%44"), data("QUJ\u00e9"), data("QUJ\0"), data("QUJD!!!!"), data("A" * 70000 + "*AAA"),
        data("A" * ((1 << 20) - 4) + "QQ==" + "AAAA"), data("QUJD", "image/png"), data("QUJD", ""), "data:",
        "data:;base64", data("QUJD", "image/png;base64;x"), data("QUJD", "image/png;" + "x" * 2000 + ";base64"),
    ],
    ids=lambda u: u[:30],
)  # fmt: skip
def test_wrong_base64(url):
    refusal(MediaLoader(), url, 400, "QUJ")


def test_long_data_urls_stop_at_the_cap():
    text = "A" * (40 << 20)
    tracemalloc.start()
    refusal(MediaLoader(max_bytes=1 << 20), data(text), 413)
    peak = tracemalloc.get_traced_memory()[1] - len(text)
    tracemalloc.stop()
    assert peak < 8 << 20
    assert len(asyncio.run(MediaLoader(max_bytes=3000).load(data("A" * 4000), PARAM))) == 3000
    refusal(MediaLoader(max_bytes=2999), data("A" * 4000), 413)


@pytest.mark.parametrize("label", ["text/html", "application/json", "TEXT/plain;x=image/png", "audio/wav", "x"])
def test_data_urls_of_other_types(label):
    refusal(MediaLoader(), data("QUJD", f"{label};base64"), 415, label)
