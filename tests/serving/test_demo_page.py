"""The page's files as the server gives them out. What a browser makes of them is in test_page.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from models.images import FORMATS
from serving.demo_page import FOLDER

FILES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {  # which a browser asks for: it runs no module and takes no style sheet of another type
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


async def test_the_page_may_load_nothing_from_elsewhere_and_run_nothing_inline(server):
    response = await server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["trusted-types"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_with_its_type(server, name):
    response = await server.client.get(f"/page/{name}")
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == TYPES[Path(name).suffix]


@pytest.mark.parametrize("name", FILES)
def test_files_name_only_files_that_are_there(name):
    text = (FOLDER / name).read_text()
    named = re.findall(r'(?:from "\./|href="page/|src="page/)([^"]+)"', text)
    assert set(named) <= set(FILES)


def test_the_files_that_can_be_chosen_are_the_pictures_that_the_server_takes():
    accepted = re.search(r'accept="([^"]+)"', (FOLDER / "index.html").read_text())[1].split(",")
    Image.init()
    assert set(accepted) == {Image.MIME[name] for name in FORMATS}


def test_no_file_makes_html_from_text_or_names_another_server():
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name
        addresses = set(re.findall(r"https?://[a-z0-9.]+", text)) - {
            "http://www.w3.org",
            "https://html.spec.whatwg.org",
        }
        assert not addresses, name


@pytest.mark.parametrize(
    "path", ["/page/", "/page/nothing.mjs", "/page/../app.py", "/page/%2e%2e/app.py", "/page/.html"]
)
async def test_nothing_else_is_served(server, path):
    response = await server.client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith("there is no GET")
