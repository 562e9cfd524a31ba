"""The API key, and pages of other origins."""

from __future__ import annotations

import logging
import socket

import httpx
import openai
import pytest

from serving.settings import API_KEY_VARIABLE, parse_settings

from .chat_client import COMPLETIONS, body
from .conftest import scripted_server
from .test_http import assert_refused

KEY = "sk-0123456789abcdef"
OTHER = "sk-another"
PAGE = "https://lab.example:8443"


@pytest.fixture
async def locked():
    async with scripted_server(api_keys=(KEY, OTHER)) as running:
        yield running


@pytest.fixture
async def shared():
    """A server that one page may use, with the key."""
    async with scripted_server(api_keys=(KEY, OTHER), allowed_origins=(PAGE,)) as running:
        yield running


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {KEY}"},
        {"X-Api-Key": KEY},
        {"Authorization": "Bearer wrong", "X-Api-Key": KEY},
        {"Authorization": f"Bearer {KEY}", "X-Api-Key": ""},
        {"X-Api-Key": OTHER},
    ],
)
async def test_the_key_opens(locked, headers):
    assert (await locked.client.post(COMPLETIONS, json=body("hi"), headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Bearer {KEY} {KEY}"},
        {"Authorization": "Bearer"},
        {"Authorization": ""},
        {"X-Api-Key": f"Bearer {KEY}"},
        {"X-Api-Key": "\xff\xe9".encode("latin-1")},
        {"X-Api-Key": "x" * 10_000},
        {"Cookie": f"api_key={KEY}"},
    ],
)
async def test_nothing_else_opens(locked, headers):
    response = await locked.client.post(COMPLETIONS, headers=headers, json=body("hi"))
    assert assert_refused(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert locked.engine.total_requests == locked.model.prepared == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("DELETE", COMPLETIONS),
        ("OPTIONS", COMPLETIONS),
        ("GET", "/health/"),
        ("GET", "/page/../metrics"),
        ("GET", "/page/x%2f..%2fmetrics"),
    ],
)
async def test_every_path_is_locked(locked, method, path):
    """One that does not exist too, so that nobody can find out which do."""
    assert_refused(await locked.client.request(method, path), 401)


async def test_the_key_in_the_address_does_not_open(locked):
    assert (await locked.client.get(f"/v1/models?api_key={KEY}")).status_code == 401


async def test_health_is_open(locked):
    assert (await locked.client.get("/health")).status_code == 200


async def test_without_a_key_any_is_taken(server):
    for headers in ({}, {"Authorization": "Bearer anything"}):
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


async def test_openai_knows_the_error(locked):
    async with openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.models.list()
        assert refused.value.code == "invalid_api_key"
    async with openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0) as client:
        assert (await client.models.list()).data


async def test_the_key_is_in_no_log_and_no_answer(locked, caplog):
    caplog.set_level(logging.DEBUG)
    for key in (KEY, "another-key"):
        headers = {"Authorization": f"Bearer {key}"}
        response = await locked.client.post("/v1/nowhere", json={}, headers=headers)
        assert key not in response.text
        await locked.until(lambda: caplog.records)
        assert key not in caplog.text


def test_where_the_key_comes_from(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert parse_settings([]).api_keys == ()
    assert parse_settings(["--api-key-file", str(file)]).api_keys == (KEY,)
    monkeypatch.setenv(API_KEY_VARIABLE, "from-the-environment")
    assert parse_settings([]).api_keys == ("from-the-environment",)
    assert parse_settings(["--api-key-file", str(file)]).api_keys == (KEY,)
    file.write_text(f"{KEY}\n\n  {OTHER}\n")
    assert parse_settings(["--api-key-file", str(file)]).api_keys == (KEY, OTHER)
    assert KEY not in repr(parse_settings(["--api-key-file", str(file)]))


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"one\ntwo words", b"\xc3\xa9", b"\x00"])
def test_keys_that_are_refused(tmp_path, capsys, content):
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(SystemExit):
        parse_settings(["--api-key-file", str(file)])
    assert f"--api-key-file {file}: an API key should be" in capsys.readouterr().err


def test_a_key_that_is_not_there_is_not_no_key(tmp_path, monkeypatch, capsys):
    """A server that was meant to be locked must not start open."""
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(SystemExit):
            parse_settings(["--api-key-file", str(file)])
        assert "--api-key-file: " in capsys.readouterr().err
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(SystemExit):
        parse_settings([])
    assert API_KEY_VARIABLE in capsys.readouterr().err


def cross_origin(response: httpx.Response) -> list[str]:
    """The headers that concern other origins."""
    return sorted(name for name in response.headers if name.startswith("access-control-"))


def preflight(origin: str, **headers: str) -> dict[str, str]:
    wanted = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"Origin": origin, "Access-Control-Request-Method": "POST"} | wanted


async def test_a_browser_may_ask_for_an_allowed_page(shared):
    """It asks without the key, as browsers do, and for the headers that openai-node sends."""
    wanted = "authorization,content-type,x-stainless-arch"
    headers = preflight(PAGE, Access_Control_Request_Headers=wanted)
    for path in (COMPLETIONS, "/nowhere"):
        response = await shared.client.options(path, headers=headers)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-allow-headers"] == wanted
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "Origin" in response.headers["vary"]
    odd = preflight(PAGE, Access_Control_Request_Headers="x;y")
    assert "Authorization" in (await shared.client.options("/", headers=odd)).headers["access-control-allow-headers"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_allowed_page_reads_answers_and_errors(shared, stream):
    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
    for request, status in ((body("hi", stream=stream), 200), ({}, 400)):
        response = await shared.client.post(COMPLETIONS, json=request, headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-expose-headers"] == "Retry-After"
    refused = await shared.client.post(COMPLETIONS, json=body("hi"), headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize(
    "origin",
    [
        "https://lab.example",
        "http://lab.example:8443",
        f"{PAGE}.evil.example",
        f"{PAGE}/",
        PAGE.upper(),
        "null",
        "*",
        "",
    ],
)
async def test_other_pages_are_told_nothing(shared, origin):
    refused = await shared.client.options(COMPLETIONS, headers=preflight(origin))
    assert (refused.status_code, cross_origin(refused)) == (401, [])
    headers = {"Origin": origin, "Authorization": f"Bearer {KEY}"}
    response = await shared.client.post(COMPLETIONS, json=body("hi"), headers=headers)
    assert (response.status_code, cross_origin(response)) == (200, [])
    assert "Origin" in response.headers["vary"]


async def test_without_allowed_pages_nothing_is_said(server):
    response = await server.client.get("/health", headers={"Origin": PAGE})
    assert cross_origin(response) == []
    assert "vary" not in response.headers


def test_origins_on_the_command_line(capsys):
    assert parse_settings([]).allowed_origins == ()
    several = ["--allowed-origin", PAGE, "--allowed-origin", "http://[::1]:3000"]
    assert parse_settings(several).allowed_origins == (PAGE, "http://[::1]:3000")
    for wrong in (
        "*",
        "null",
        "lab.example",
        f"{PAGE}/",
        f"{PAGE}/page",
        "https://Lab.example",
        "https://*.example",
        "",
    ):
        with pytest.raises(SystemExit):
            parse_settings(["--allowed-origin", wrong])
        assert "--allowed-origin" in capsys.readouterr().err


async def test_what_is_kept_for_one_key_is_not_used_for_another(locked):
    question = body("a question that is long enough to be worth keeping")

    async def reused(key: str) -> int:
        response = await locked.client.post(COMPLETIONS, json=question, headers={"X-Api-Key": key})
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [await reused(key) > 0 for key in (KEY, OTHER, KEY, OTHER)] == [False, False, True, True]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
@pytest.mark.parametrize("path", ["/", "/health", "/admin/status", "/metrics", "/v1/models"])
async def test_a_name_that_is_not_the_servers_is_refused_where_there_is_no_key(server, host, path):
    response = await server.client.get(path, headers={"Host": host})
    assert assert_refused(response, 403)["code"] == "forbidden_host"


async def test_another_pages_name_gets_no_answer_from_the_model(server):
    headers = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    response = await server.client.post(COMPLETIONS, json=body("hi"), headers=headers)
    assert response.status_code == 403
    assert server.model.prepared == 0


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "app.localhost:8000", "127.0.0.1", "[::1]:8000", "192.168.0.7:8000"]
)
async def test_names_and_addresses_of_the_machine_pass(server, host):
    assert (await server.client.get("/health", headers={"Host": host})).status_code == 200


async def test_a_name_can_be_allowed_and_a_key_makes_names_unimportant():
    async with scripted_server(allowed_hosts=("Board.lab",)) as named:
        assert (await named.client.get("/health", headers={"Host": "board.lab:8000"})).status_code == 200
    async with scripted_server(api_keys=(KEY,)) as locked:
        headers = {"Host": "any.example", "X-Api-Key": KEY}
        assert (await locked.client.get("/v1/models", headers=headers)).status_code == 200


async def test_no_name_server_is_asked_for_the_names_of_the_machine(monkeypatch):
    """It may be far away, and the server would start only when it has answered, or not."""
    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "gethostbyname_ex"):
        monkeypatch.setattr(socket, name, lambda *_: pytest.fail("asked"))
    async with scripted_server() as server:
        headers = {"Host": f"{socket.gethostname()}:8000"}
        assert (await server.client.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP"])
async def test_a_proxy_may_not_end_a_server_without_a_key(server, header):
    response = await server.client.post("/admin/shutdown", headers={header: "10.0.0.7"})
    assert response.status_code == 403
    assert not server.engine.asked_to_stop.is_set()


def test_a_key_on_the_command_line_is_not_taken_for_the_name_of_its_file(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["--api-key", KEY])
    assert "file" not in capsys.readouterr().err.split("unrecognized arguments")[1]
