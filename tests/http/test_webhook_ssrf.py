"""Webhooks cannot be turned against the network that the server stands in: not by any spelling of a URL, not by DNS,
not by redirects, not by an answer of DNS that changes between two looks."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

import pytest

from headrace.addresses import Destination, UrlRules, check_webhook_url
from headrace.config import ConfigError, Settings, load_settings
from headrace.engine.figures import Deliveries
from headrace.errors import InvalidCommand
from headrace.server.outgoing import DeliveryFailed, Forbidden, Outgoing
from tests.http.hookrig import OUTSIDE, RULES, Dns, rig_with
from tests.http.receiver import Receiver, answer
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

HOSTILE = [
    # this machine by name
    "http://localhost/",
    "http://localhost./",
    "http://localhost..../",
    "http://LOCALHOST:6790/queues",
    "http://LocalHost.:80",
    "http://anything.localhost/",
    "http://anything.localhost./",
    "http://localhost.localdomain/",
    "http://ip6-localhost/",
    "http://ip6-loopback/",
    "http://%6c%6f%63%61%6c%68%6f%73%74/",
    "http://loc\u200balhost/",
    "http://ｌｏｃａｌｈｏｓｔ/",  # noqa: RUF001
    "http://loc\talhost/",
    "http://local\nhost/",
    # this machine by address
    "http://127.0.0.1/",
    "http://127.0.0.1.",
    "http://127.1/",
    "http://127.0.1/",
    "http://127.255.255.254/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0x7f.1/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://00000177.1/",
    "http://127.0.0.1:6789/",
    "http://127。0。0。1/",
    "http://①②⑦.0.0.1/",
    "http://127.0.0.%31/",
    "http://0/",
    "http://0.0.0.0/",
    "http://0x0/",
    "http://[::1]/",
    "http://[::]/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1%25lo]/",
    "http://[fe80::1%lo]/",
    "http://[::1%25eth0]/",
    # its network
    "http://10.0.0.1/",
    "http://10.1/",
    "http://167772161/",
    "http://0xa000001/",
    "http://012.0.0.1/",
    "http://172.16.0.1/",
    "http://172.31.255.255/",
    "http://192.168.0.1/",
    "http://3232235521/",
    "http://0300.0250.0.1/",
    "http://100.64.0.1/",
    "http://198.18.0.1/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://[fc00::1]/",
    "http://[fd12:3456::1]/",
    "http://[fec0::1]/",
    "http://[ff02::1]/",
    "http://[::ffff:10.0.0.1]/",
    "http://[::ffff:c0a8:1]/",
    # services that hand out credentials
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.169.254./",
    "http://2852039166/",
    "http://0xa9fea9fe/",
    "http://0251.0376.0251.0376/",
    "http://169.254.43518/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[fd00:ec2::254]/",
    "http://100.100.100.200/",
    "http://192.0.0.192/",
    "http://metadata.google.internal/",
    "http://METADATA.google.INTERNAL./",
    "http://vault.internal/",
    # the host is elsewhere than it seems
    "http://example.com@127.0.0.1/",
    "http://example.com:80@127.0.0.1:80/",
    "http://a@b@127.0.0.1/",
    "http://example.com%40127.0.0.1/",
    "http://127.0.0.1\\@example.com/",
    "http://127.0.0.1#@example.com/",
    "http://127.0.0.1?@example.com/",
    "http:127.0.0.1",
    "http:/127.0.0.1",
    "http:\\\\127.0.0.1",
    "http:////127.0.0.1",
    " \thttp://127.0.0.1/",
    # other protocols
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_FLUSHALL",
    "ftp://127.0.0.1/",
    "unix:/var/run/docker.sock",
    "//127.0.0.1/",
]
INSIDE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.20.0.1", "192.168.1.1", "100.64.1.1", "169.254.169.254",
    "192.0.0.192", "198.19.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%1", "fc00::1",
    "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe",
]  # fmt: skip


# -- when a webhook is added -------------------------------------------------------------------------------------------


def test_there_are_enough_hostile_urls_and_no_two_alike() -> None:
    assert len(set(HOSTILE)) == len(HOSTILE) >= 60


@pytest.mark.parametrize("url", HOSTILE)
def test_a_hostile_url_is_refused_when_it_is_added(client: Client, url: str) -> None:
    error = client.error("AddWebhook", url=url, events=["job.pushed"])
    assert error.startswith(("Webhook URL cannot point to ", "Invalid URL format", "Webhook URL must use http"))
    assert client.ok("ListWebhooks")["data"]["stats"]["total"] == 0


@pytest.fixture(scope="module")
def on_premises(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--webhook-allow", "10.1.0.0/16,192.168.7.7", "--webhook-allow", "127.0.0.0/8")
    with ServerProcess(tmp_path_factory.mktemp("premises") / "headrace.db", *flags) as running:
        yield running


@pytest.mark.parametrize(
    "url",
    [
        "http://10.1.255.255/", "http://192.168.7.7", "http://127.0.0.1:9/", "http://0x7f.1/", "http://localhost:1/x",
        "http://a.localhost/", "http://[::ffff:10.1.0.1]/", "http://hooks.internal/", "https://example.com",
    ],
)  # fmt: skip
def test_allowed_networks_may_be_called(on_premises: ServerProcess, url: str) -> None:
    with on_premises.client() as client:
        client.ok("AddWebhook", url=url, events=[])


@pytest.mark.parametrize(
    "url",
    [
        "http://10.2.0.1/", "http://192.168.7.8", "http://169.254.169.254/", "http://[::1]/", "http://[64:ff9b::a01:1]/",
        "http://[2002:a01:1::]/", "http://metadata.google.internal/", "http://0.0.0.0/", "http://172.16.0.1/",
    ],
)  # fmt: skip
def test_what_is_inside_but_not_allowed_stays_refused(on_premises: ServerProcess, url: str) -> None:
    with on_premises.client() as client:
        assert client.error("AddWebhook", url=url, events=[]).startswith("Webhook URL cannot point to ")


@pytest.mark.parametrize(
    ("settings", "is_required"),
    [
        (Settings(), False),
        (Settings(host="localhost"), False),
        (Settings(host="::1"), False),
        (Settings(host="0.0.0.0"), True),
        (Settings(host="queue.example.com"), True),
        (Settings(auth_tokens=["t"]), True),
        (Settings(auth_tokens=["t"], webhook_require_https=False), False),
        (Settings(webhook_require_https=True), True),
    ],
)
def test_https_is_required_by_default_when_others_can_reach_the_server(settings: Settings, is_required: bool) -> None:
    assert settings.requires_https_webhooks is is_required


def test_the_settings_of_webhooks_come_from_flags_and_environment() -> None:
    environ = {"HEADRACE_WEBHOOK_ALLOW": "10.0.0.0/8, fd00::/8", "HEADRACE_WEBHOOK_REQUIRE_HTTPS": "true"}
    settings = load_settings({}, environ)
    assert settings.webhook_allow == ["10.0.0.0/8", "fd00::/8"]
    assert settings.webhook_require_https is True
    with pytest.raises(ConfigError, match="--webhook-allow needs networks"):
        load_settings({"webhook_allow": ["10.0.0.1/8"]}, {})
    with pytest.raises(ConfigError, match="--webhook-max-retries must be at least 1"):
        load_settings({"webhook_max_retries": 0}, {})


# -- when a delivery is made -------------------------------------------------------------------------------------------


@pytest.fixture
def inside() -> Iterator[Receiver]:
    """What must not be reached."""
    with Receiver(host="127.0.0.1") as receiver:
        yield receiver


@pytest.fixture
def outside(inside: Receiver) -> Iterator[Receiver]:
    """What may be reached, on the same port as what must not."""
    with Receiver(host=OUTSIDE, port=inside.port) as receiver:
        yield receiver


@pytest.mark.parametrize("address", INSIDE)
async def test_a_name_that_leads_inside_is_not_called(inside: Receiver, address: str) -> None:
    async with rig_with([address]) as (rig, dns):
        await rig.add(f"http://innocent.example:{inside.port}/")
        await rig.push()
        await rig.until(lambda deliveries: deliveries.refused == 1)
        assert (await rig.last_error() or "").startswith("Webhook URL cannot point to ")
        assert dns.asked == ["innocent.example"]  # and it is not tried again
    assert inside.calls == []


@pytest.mark.parametrize("answers", [[OUTSIDE, "127.0.0.1"], ["127.0.0.1", OUTSIDE], [OUTSIDE, "::1", OUTSIDE]])
async def test_one_address_inside_among_others_spoils_the_name(
    inside: Receiver, outside: Receiver, answers: list[str]
) -> None:
    async with rig_with(answers) as (rig, _):
        await rig.add(f"http://mixed.example:{inside.port}/")
        await rig.push()
        await rig.until(lambda deliveries: deliveries.refused == 1)
    assert inside.calls == outside.calls == []


async def test_only_the_address_that_was_checked_is_called_when_dns_changes_its_mind(
    inside: Receiver, outside: Receiver
) -> None:
    async with rig_with([OUTSIDE], ["127.0.0.1"]) as (rig, dns):
        await rig.add(f"http://rebound.example:{inside.port}/")
        await rig.push()
        await rig.until(lambda deliveries: deliveries.succeeded == 1)
        assert len(dns.asked) == 1
        assert [call.headers["Host"] for call in outside.calls] == [f"rebound.example:{inside.port}"]
        await rig.push()
        await rig.until(lambda deliveries: deliveries.refused == 1)
        assert len(dns.asked) == 2
    assert len(outside.calls) == 1
    assert inside.calls == []


async def test_dns_that_changes_its_mind_between_retries_is_checked_again(inside: Receiver, outside: Receiver) -> None:
    outside.answer = answer(500)
    async with rig_with([OUTSIDE], ["127.0.0.1"]) as (rig, dns):
        await rig.add(f"http://rebound.example:{inside.port}/")
        await rig.push()
        await rig.until(lambda deliveries: deliveries.refused == 1)
        assert len(dns.asked) == 2
        assert await rig.last_error() == "Webhook URL cannot point to loopback IP"
    assert (len(outside.calls), inside.calls) == (1, [])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_failures_and_not_followed(inside: Receiver, outside: Receiver, status: int) -> None:
    outside.answer = answer(status, Location=f"http://127.0.0.1:{inside.port}/")
    async with rig_with([OUTSIDE]) as (rig, _):
        await rig.add(f"http://redirecting.example:{inside.port}/")
        await rig.push()
        await rig.until(lambda deliveries: deliveries.failed == 1)
        assert await rig.last_error() == f"answered {status}"
        assert rig.deliveries == Deliveries(failed=1, retried=2)
    assert (len(outside.calls), inside.calls) == (3, [])


async def test_proxies_of_the_environment_are_not_asked(
    inside: Receiver, outside: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{inside.port}")
    async with rig_with([OUTSIDE]) as (rig, _):
        await rig.add(f"http://direct.example:{inside.port}/")
        await rig.push()
        await rig.until(lambda deliveries: deliveries.succeeded == 1)
    assert (len(outside.calls), inside.calls) == (1, [])


async def test_an_address_that_does_not_answer_gives_way_to_the_next_one(outside: Receiver) -> None:
    rules = UrlRules((ip_network("127.0.0.0/8"),))
    to = check_webhook_url(f"http://two.example:{outside.port}/", rules)
    assert await Outgoing(rules, Dns(["127.9.9.9", OUTSIDE])).post(to, {}, b"{}") == 200
    assert len(outside.calls) == 1


async def test_a_name_without_an_address_is_a_failure_like_any_other() -> None:
    with pytest.raises(DeliveryFailed, match="the name has no address"):
        await Outgoing(RULES, Dns([])).post(check_webhook_url("http://empty.example", RULES), {}, b"")
    with pytest.raises(DeliveryFailed, match="could not be looked up"):
        await Outgoing(RULES).post(check_webhook_url("http://no-such-name.invalid", RULES), {}, b"")


async def test_a_name_of_this_machine_is_refused_by_what_the_real_resolver_says(inside: Receiver) -> None:
    """The check of URLs would refuse it already; this is the second line of defence on its own."""
    with pytest.raises(Forbidden, match="Webhook URL cannot point to loopback IP"):
        await Outgoing(UrlRules()).post(Destination("http", "localhost", inside.port, "/", ""), {}, b"")
    assert inside.calls == []


@pytest.mark.parametrize("name", ["localhost.", "LOCALHOST", "127.1", "0x7f.1", "2130706433", "017700000001", "::1"])
async def test_no_spelling_that_a_resolver_might_understand_leads_inside(inside: Receiver, name: str) -> None:
    """Resolvers differ in what they take for an address: each is refused, or not known at all."""
    with pytest.raises(DeliveryFailed, match=r"cannot point to|could not be looked up"):
        await Outgoing(UrlRules()).post(Destination("http", name, inside.port, "/", ""), {}, b"")
    assert inside.calls == []


async def test_nothing_in_a_url_can_add_a_header(outside: Receiver) -> None:
    url = f"http://{OUTSIDE}:{outside.port}/a\r\nX-Evil: 1\r\n\r\nb?c=\x00\x7f d\u2028#\r\n"
    assert await Outgoing(RULES).post(check_webhook_url(url, RULES), {}, b"") == 200
    (call,) = outside.calls
    assert call.path == "/aX-Evil:%201b?c=%00%7F%20d%E2%80%A8"
    assert "X-Evil" not in call.headers


@pytest.mark.parametrize("url", ["http://exam\rple.com\n", "http://user\r\n:pw@example.com"])
def test_line_breaks_do_not_reach_host_or_credentials(url: str) -> None:
    to = check_webhook_url(url)
    assert to.authority == "example.com"
    assert "\r" not in to.credentials + to.target
    with pytest.raises(InvalidCommand):
        check_webhook_url("http://exam%0d%0aple.com")
