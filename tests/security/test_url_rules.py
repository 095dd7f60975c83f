"""Addresses and URLs that a stranger may send, in every spelling."""

from ipaddress import ip_address

import pytest

from tests.hostile.refusals import refusal
from trencadis.multimodal.sources import http_fetch
from trencadis.multimodal.sources.http_fetch import AddressRules, is_public, parse_url
from trencadis.multimodal.sources.media_loader import MediaLoader


@pytest.fixture
def no_connection(monkeypatch):
    async def fail(*_):
        pytest.fail("connected")

    monkeypatch.setattr(http_fetch.Fetcher, "_exchange", fail)


FORBIDDEN = """127.0.0.1 127.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 0 0.0.0.0 localhost localhost.
LOCALHOST [::1] [::] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1] [::127.0.0.1] [64:ff9b::7f00:1]
[64:ff9b:1::1] [2002:7f00:1::] [2002:a9fe:a9fe::1] [2001:0:4136:e378:8000:63bf:80ff:fffe] [2001:db8::1] [fe80::1]
[fc00::1] [fd00:ec2::254] [fec0::1] [ff02::1] [2606:4700::5efe:a00:1] [100::1] [4000::1]
169.254.169.254 10.0.0.1 172.16.5.4 192.168.1.1 100.64.0.1 192.0.0.8 192.0.2.1 192.88.99.1 198.18.0.1 203.0.113.9
224.0.0.1 240.0.0.1 255.255.255.255 １２７.０.０.１ ①②⑦.⓪.⓪.① 127。0。0。1 ｌｏｃａｌｈｏｓｔ""".split()  # noqa: SIM905


@pytest.mark.parametrize("host", FORBIDDEN)
def test_private_addresses_in_every_spelling(no_connection, host):
    for url in (f"http://{host}/secret.png", f"HTTPS://{host}:8443?x"):
        refusal(MediaLoader(), url, 403, host, "secret")


MALFORMED = [
    "http://user@127.0.0.1/", "http://a:b@93.184.215.14/", "http://93.184.215.14\\@127.0.0.1/", "http:\\\\127.0.0.1/",
    "http://127.0.0.1%2f@example.com/", "http:///path", "http://", "http://?x", "http://#x", "http:/127.0.0.1/",
    "http:", "http://93.184.215.14:0/", "http://93.184.215.14:65536/", "http://93.184.215.14:99999999999/",
    "http://h:80:80/",
    "http://h:/", "http://h:-1/", "http://[::1/", "http://::1/", "http://[::1]x/", "http://[fe80::1%25eth0]/",
    "http://[1.2.3.4]/", "http://exa mple/", "http://exa\tmple/", "http://example\r\nHost: x/", "http://example/\0",
    "http://example/a b", "http://example/a\\b", "http://example/\u2028", "http://.../", "http://.a/", "http://a..b/",
    "http://-a/",
    "http://" + "a" * 64 + "/", "http://" + "a." * 130 + "b/", "http://xn--\u00fc/", "http://example.com,evil.com/",
    "http://example.com/" + "a" * 9000, "http://ex%61mple/", "http://\u202eexample/",
]  # fmt: skip


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed_urls(no_connection, url):
    refusal(MediaLoader(), url, 400, "127.0.0.1", "93.184", "example")


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "gopher://a", "jar:http://a", "C:\\x.png", "/etc/passwd", "", " http://a/"]
)
def test_other_schemes(no_connection, url):
    assert refusal(MediaLoader(), url, 400) == "The URL must be either a HTTP, data or file URL."


def test_parsed_urls():
    url = parse_url("HTTPS://Bücher.Example.:8443?q=1#frag")
    assert (url.scheme, url.host, url.port, url.target) == ("https", "xn--bcher-kva.example", 8443, "/?q=1")
    assert url.authority == "xn--bcher-kva.example:8443"
    assert str(parse_url("http://[2606:4700::6810:84E5]:80/a")) == "http://[2606:4700::6810:84e5]/a"


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "8.8.8.8", "2606:4700::6810:84e5", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public_addresses_are_public(address):
    assert is_public(ip_address(address))


def test_hosts_that_are_not_listed_are_not_even_looked_up():
    async def resolver(host, port):
        pytest.fail("looked up")

    refusal(MediaLoader(["a.example"], resolver=resolver), "http://b.example/", 403, "b.example")


def test_lists_of_hosts():
    rules = AddressRules.from_hosts(["pictures.example", ".corp.example", "169.254.169.254", "[::1]"])
    assert rules.allows_host("pictures.example") and rules.allows_host("a.corp.example")
    assert not any(
        map(rules.allows_host, ["corp.example", "evilpictures.example", "a.pictures.example", "xcorp.example"])
    )
    assert rules.allows_address("pictures.example", "10.0.0.1") and rules.allows_address("::1", "::1")
    assert not rules.allows_address("pictures.example", "169.254.169.254")
    assert not rules.allows_address("pictures.example", "::ffff:169.254.169.254")
    assert not rules.allows_address("pictures.example", "fe80::1%eth0")
    assert not rules.allows_address("pictures.example", "garbage")
    assert rules.allows_address("169.254.169.254", "169.254.169.254")
    assert not rules.allows_address("other.example", "8.8.8.8")
    assert AddressRules.from_hosts([]).allows_address("any.example", "8.8.8.8")
