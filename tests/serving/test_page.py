"""The page in a real browser, against a real server with a scripted model."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import xml.etree.ElementTree as ET
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

pytest.importorskip("playwright")
from playwright.async_api import Page, expect

from serving.media import MOST_MEDIA

from .browser import EXECUTABLE, WHY_NOT, launched
from .conftest import scripted_server
from .make_page_picture import parsed, take
from .scripted_model import ScriptedModel, say_what_the_user_said

if EXECUTABLE is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all tests
expect.set_options(timeout=60_000)  # the machine may be busy with something else
NOT_THE_PAGES_FAULT = ("Failed to load resource", "net::ERR_")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with launched() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser):
    """Opens a server's page in a tab, of a browser profile of its own or `beside` another tab. The page must report no
    error of its own in it."""
    contexts, complaints = [], []

    async def opened(server, beside: Page | None = None, wait: bool = True, **options) -> Page:
        if beside is None:
            contexts.append(await browser.new_context(base_url=server.url, **options))
        page = await (beside.context if beside else contexts[-1]).new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        await page.goto("/")
        if wait:
            await page.locator("body[data-ready]").wait_for()
        return page

    yield opened
    for context in contexts:
        await context.close()
    assert not [line for line in complaints if not any(known in line for known in NOT_THE_PAGES_FAULT)]


@asynccontextmanager
async def serving(answer=say_what_the_user_said, model=None, **settings):
    async with scripted_server(model or ScriptedModel(answer=answer), **settings) as server:
        yield server


async def send(page: Page, text: str) -> None:
    await page.get_by_role("textbox", name="Message").fill(text)
    await page.keyboard.press("Enter")


async def send_in_vain(page: Page, server, text: str) -> None:
    """Sends a message that the server refuses."""
    server.engine.state = "draining"
    await send(page, text)
    await expect(page.locator("#messages > li").last.get_by_role("alert")).to_be_visible()
    server.engine.state = "ok"


async def ask(page: Page, text: str) -> str:
    """The answer, once it is complete."""
    before = await page.locator(".answer").count()
    await send(page, text)
    await expect(page.locator(".answer:not(.arriving)")).to_have_count(before + 1)
    return await page.locator(".answer .text").last.inner_text()


def png(width: int, height: int) -> dict:
    """A picture as Playwright takes files."""
    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 80, 60)).save(data, "PNG")
    return {"name": f"{width}x{height}.png", "mimeType": "image/png", "buffer": data.getvalue()}


def sizes(messages) -> str:
    """What a scripted model sees: the sizes of the last turn's pictures."""
    content = messages[-1]["content"]
    pictures = [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
    seen = [part["load"]()["image"].size for part in pictures]
    return ", ".join(f"{width}x{height}" for width, height in seen) or "no picture"


async def test_a_conversation(tab):
    async with serving(lambda messages: f"{len(messages)} turns, the last: {messages[-1]['content']}") as server:
        page = await tab(server)
        await expect(page.locator("#server")).to_have_text("scripted ready")
        assert await ask(page, "你好 👋") == "1 turns, the last: 你好 👋"
        assert await ask(page, "and <b>you</b>?") == "3 turns, the last: and <b>you</b>?"
        assert await page.locator(".question .text").all_inner_texts() == ["你好 👋", "and <b>you</b>?"]
        await expect(page.locator("#announcer")).to_have_text("The answer: 3 turns, the last: and <b>you</b>?")


async def test_text_and_timeline_grow_while_the_answer_arrives(tab):
    model = ScriptedModel(answer=lambda _: "abcdefgh", hold_at=6)  # a prefill, then four of the letters
    async with serving(model=model) as server:
        page = await tab(server)
        await send(page, "go")
        await expect(page.locator(".arriving .text")).to_have_text("abcd")
        await expect(page.locator("#chart-bars svg text")).to_have_text("3")
        await expect(page.locator("#server")).to_have_text("scripted ready")
        await expect(page.get_by_role("button", name="Stop")).to_be_visible()
        await expect(page.get_by_role("button", name="Send")).to_be_hidden()
        model.gate.set()
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("abcdefgh")
        await expect(page.locator("#chart-bars svg text")).to_have_text("7")


async def test_pictures_by_button_and_removal(tab):
    async with serving(sizes) as server:
        page = await tab(server)
        await page.locator("#files").set_input_files([png(40, 30), png(50, 20), png(60, 10)])
        await expect(page.locator("#pictures img")).to_have_count(3)
        await page.get_by_role("button", name="Remove 50x20.png").click()
        await expect(page.locator("#pictures img")).to_have_count(2)
        await expect(page.get_by_role("button", name="Remove 60x10.png")).to_be_focused()
        assert await ask(page, "") == "40x30, 60x10"
        await expect(page.locator("#pictures img")).to_have_count(0)
        await expect(page.locator(".question img")).to_have_count(2)
        assert await ask(page, "and now?") == "no picture"


async def test_a_conversation_takes_as_many_pictures_as_a_request(tab):
    async with serving(sizes) as server:
        page = await tab(server)
        chosen, remark = page.locator("#pictures img"), page.locator("#picture-remark")
        more_than_half = [png(40, 30)] * (MOST_MEDIA // 2 + 1)
        await page.locator("#files").set_input_files(more_than_half)
        await expect(chosen).to_have_count(len(more_than_half))
        await ask(page, "these")
        await page.locator("#files").set_input_files(more_than_half)
        await expect(remark).to_contain_text(f"at most {MOST_MEDIA} pictures")
        await expect(chosen).to_have_count(MOST_MEDIA - len(more_than_half))
        assert (await ask(page, "and these")).count("40x30") == MOST_MEDIA - len(more_than_half)
        await page.locator("#files").set_input_files([png(40, 30)])
        await expect(remark).to_contain_text(f"at most {MOST_MEDIA} pictures")
        await expect(chosen).to_have_count(0)
        assert await ask(page, "and now?") == "no picture"


HELD_FILES = """() => {
  const read = FileReader.prototype.readAsDataURL;
  window.reading = new Promise((begun) => {
    FileReader.prototype.readAsDataURL = function (file) {
      window.release = () => read.call(this, file);
      begun();
    };
  });
}"""


async def test_a_message_waits_for_its_pictures(tab):
    async with serving(sizes) as server:
        page = await tab(server)
        await page.evaluate(HELD_FILES)
        await page.locator("#files").set_input_files([png(40, 30)])
        await page.evaluate("() => reading")
        await send(page, "what is this?")
        await expect(page.get_by_role("textbox", name="Message")).to_have_value("what is this?")
        await page.evaluate("() => release()")
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("40x30")


PASTE = """([name, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: name.endsWith("png") ? "image/png" : "text/html" }));
  return transfer;
}"""


@pytest.mark.parametrize(
    "dispatch",
    [
        "(transfer) => document.body.dispatchEvent("
        "new ClipboardEvent('paste', { clipboardData: transfer, bubbles: true, cancelable: true }))",
        "(transfer) => { for (const kind of ['dragover', 'drop']) document.body.dispatchEvent("
        "new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true })) }",
    ],
    ids=["paste", "drop"],
)
async def test_pictures_by_paste_and_drop(tab, dispatch):
    async with serving(sizes) as server:
        page = await tab(server)
        for file in (png(40, 30), png(20, 50), png(1, 1) | {"name": "page.html"}):
            data = base64.b64encode(file["buffer"]).decode()
            transfer = await page.evaluate_handle(PASTE, [file["name"], data])
            await page.evaluate(dispatch, transfer)
        await expect(page.locator("#picture-remark")).to_contain_text("1 file left out: only PNG")
        await expect(page.locator("#pictures img")).to_have_count(2)
        await expect(page.locator("#drop-hint")).to_be_hidden()
        assert sorted((await ask(page, "what are these?")).split(", ")) == ["20x50", "40x30"]


@pytest.mark.parametrize("way", ["button", "Escape"])
async def test_stop_keeps_what_has_come_and_frees_the_server(tab, way):
    model = ScriptedModel(answer=lambda _: "abcdefgh", hold_at=5)
    async with serving(model=model) as server:
        page = await tab(server)
        await send(page, "go")
        await expect(page.locator(".arriving .text")).to_have_text("abc")
        job = await server.held()
        if way == "button":
            await page.get_by_role("button", name="Stop").click()
        else:
            await page.keyboard.press("Escape")
        await expect(page.locator(".answer .foot")).to_contain_text("Stopped.")
        await expect(page.get_by_role("textbox", name="Message")).to_be_focused()
        await server.until(lambda: job.cancelled)  # before that, the rest would be computed
        model.gate.set()
        await server.idle()
        assert model.dropped == 1
        assert await page.locator(".answer .text").inner_text() == "abc"
        assert await ask(page, "again") == "abcdefgh"


async def test_a_refusal_is_told_in_plain_words_and_can_be_tried_again(tab):
    async with serving() as server:
        page = await tab(server)
        server.engine.state = "draining"
        await send(page, "hello")
        notice = page.get_by_role("alert")
        await expect(notice).to_contain_text("The server is shutting down. Try again in 30 seconds.")
        await expect(page.locator("#server")).to_have_text("scripted shutting down")
        server.engine.state = "ok"
        await notice.get_by_role("button", name="Try again").click()
        await expect(page.locator(".answer .text")).to_have_text("hello")
        await expect(notice).to_have_count(0)
        await expect(page.locator(".question")).to_have_count(1)


async def test_only_the_last_message_can_be_put_again_and_only_while_nothing_arrives(tab):
    model = ScriptedModel(hold_at=3)
    async with serving(model=model) as server:
        page = await tab(server)
        ways = page.get_by_role("button", name=re.compile("Try again|Edit message"))
        await send_in_vain(page, server, "first")
        await expect(ways).to_have_text(["Try again", "Edit message"])
        await send(page, "second")
        await expect(page.locator(".arriving .text")).to_have_text("s")
        await expect(ways).to_have_count(0)
        model.gate.set()
        await expect(page.locator(".answer:not(.arriving)")).to_have_count(2)
        await expect(ways).to_have_count(0)
        await send_in_vain(page, server, "third")
        await expect(ways).to_have_text(["Try again", "Edit message"])
        await page.get_by_role("textbox", name="Message").fill("fourth")
        await page.get_by_role("button", name="Edit message").click()
        await expect(page.get_by_role("textbox", name="Message")).to_have_value("third\nfourth")
        assert await page.locator(".question .text").all_inner_texts() == ["first", "second"]
        assert server.engine.total_requests == 1


async def test_a_conversation_that_is_larger_than_the_server_takes(tab, tmp_path):
    small, large = tmp_path / "small.png", tmp_path / "large.bmp"
    small.write_bytes(png(40, 30)["buffer"])
    Image.new("RGB", (1500, 1500)).save(large)  # more than lies in sockets while the server refuses it
    async with serving(sizes, max_body_bytes=20_000) as server:
        page = await tab(server)
        await page.locator("#files").set_input_files([small, large])
        await expect(page.locator("#pictures img")).to_have_count(2)
        await send(page, "what is this?")
        await expect(page.get_by_role("alert")).to_contain_text("larger than the server takes")
        await page.get_by_role("button", name="Edit message").click()
        await page.get_by_role("button", name="Remove large.bmp").click()
        assert await ask(page, "") == "40x30"


async def test_a_full_waiting_room(tab):
    model = ScriptedModel(hold_at=1)
    async with serving(model=model, max_queued=1) as server:
        others = [await tab(server), await tab(server)]
        for page in others:
            await send(page, "wait")
        await server.until(lambda: server.engine.active + server.engine.queued == 2)
        page = await tab(server)
        await expect(page.locator("#server")).to_have_text("scripted busy, 1 waiting")
        await send(page, "me too")
        await expect(page.get_by_role("alert")).to_contain_text("Too many requests are waiting for the server.")
        model.gate.set()
        for page in others:
            await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("wait")


async def test_a_key_is_asked_for_and_not_kept(tab):
    async with serving(api_keys=("open-sesame",)) as server:
        page = await tab(server)
        await send(page, "hello")
        await expect(page.get_by_role("alert")).to_contain_text("The server wants an API key.")
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("API key").fill("ключ")
        await expect(page.get_by_text("Not used: a key has only")).to_be_visible()
        await page.get_by_label("API key").fill("open-sesame")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("hello")
        kept = "JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + document.cookie"
        assert "open-sesame" not in await page.evaluate(kept)


async def test_a_message_that_cannot_be_served_can_be_edited(tab):
    async with serving(sizes) as server:
        page = await tab(server)
        broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}
        await page.locator("#files").set_input_files([png(40, 30), broken])
        await expect(page.locator("#pictures img")).to_have_count(2)
        await send(page, "what is this?")
        notice = page.get_by_role("alert")
        await expect(notice).to_contain_text("The server cannot use this message as it is.")
        await expect(notice).to_contain_text("messages.0.content.1")
        await notice.get_by_role("button", name="Edit message").click()
        await expect(page.get_by_role("textbox", name="Message")).to_have_value("what is this?")
        await page.get_by_role("button", name="Remove broken.png").click()
        assert await ask(page, "what is this?") == "40x30"


async def test_a_failure_in_mid_stream(tab):
    model = ScriptedModel(answer=lambda _: "abcdefgh", faults={4: RuntimeError("secret")})
    async with serving(model=model) as server:
        page = await tab(server)
        await send(page, "go")
        notice = page.get_by_role("alert")
        await expect(notice).to_contain_text("The server failed while computing this answer.")
        assert await page.locator(".answer .text").inner_text() == "abc"
        await notice.get_by_role("button", name="Try again").click()
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("abcdefgh")


async def test_a_connection_that_is_lost(tab):
    start = 'data: {"choices":[{"delta":{"content":"half of"}}]}\n\ndata: {"cho'
    async with serving() as server:
        page = await tab(server)
        await page.route("**/completions", lambda route: route.fulfill(content_type="text/event-stream", body=start))
        await send(page, "go")
        await expect(page.get_by_role("alert")).to_contain_text("lost before the answer was complete")
        assert await page.locator(".answer .text").inner_text() == "half of"
        await page.unroute("**/completions")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("go")


async def test_a_server_that_is_gone(tab):
    async with serving() as server:
        page = await tab(server)
    await send(page, "anyone?")
    await expect(page.get_by_role("alert")).to_contain_text("There is no connection to the server.")
    await expect(page.locator("#server")).to_have_text("scripted not reachable")


HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script>
<svg onload="window.hacked=3"></svg>

[a](javascript:window.hacked=4) [b]( JaVaScRiPt:window.hacked=5) [c](data:text/html,<script>window.hacked=6</script>)
![d](x" onerror="window.hacked=7) [e](https://example.org/"onclick="window.hacked=8) <javascript:window.hacked=9>
[f](java\tscript:window.hacked=10) [g](//example.org/x) ![h](https://example.org/track.png) [i](vbscript:x)

```html"><script>window.hacked=11</script>
</code></pre><img src=x onerror="window.hacked=12">
```

| <iframe src="javascript:parent.hacked=13"> | [j](blob:https://example.org/x) |
|---|---|
| <style>*{display:none}</style> | `<img src=x onerror=window.hacked=14>` |
"""


async def test_hostile_output_stays_text(tab):
    asked_for = []
    async with serving(lambda _: HOSTILE) as server:
        page = await tab(server)
        page.on("request", lambda request: asked_for.append(request.url))
        shown = await ask(page, "attack")
        for link in await page.locator(".answer .text a").all():
            await link.dispatch_event("mouseover")
        assert await page.evaluate("window.hacked") is None
        foreign = "img, script, svg, iframe, style, object, embed, form, input, [onerror], [onclick], [onload], [style]"
        assert await page.locator(".answer .text").locator(foreign).count() == 0
        links = await page.locator(".answer .text a").evaluate_all("links => links.map((link) => link.href)")
        assert links
        assert all(link.startswith("https://example.org/") for link in links), links
        assert '<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script>' in shown
        assert all(url.startswith(server.url) for url in asked_for), asked_for


async def test_hostile_errors_and_file_names_stay_text(tab):
    attack = '<img src=x onerror="window.hacked=1">'
    async with serving() as server:
        page = await tab(server)
        await page.route("**/completions", lambda route: route.fulfill(status=400, json={"error": {"message": attack}}))
        await page.locator("#files").set_input_files([png(40, 30) | {"name": f"{attack}.png"}])
        await expect(page.locator("#pictures img")).to_have_count(1)
        await send(page, attack)
        await expect(page.get_by_role("alert")).to_contain_text(f"The server says: {attack}")
        assert await page.locator("img:not([src^='data:image/png'])").count() == 0
        assert await page.evaluate("window.hacked") is None


async def test_the_browser_itself_refuses_to_make_html_from_text(browser):
    refused = "() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } }"
    async with serving() as server:
        page = await browser.new_page()
        await page.goto(server.url)
        assert await page.evaluate(refused) == "TypeError"
        await page.close()


MARKDOWN = """# Title
A **bold *and* slanted** word, `a*b*c`, snake_case_name, 2 * 3 * 4, [a link](https://example.org/a_(b)).

1. one
   - inner
2. two

> quoted

```python
print("<b>")
```

| a | b |
|---|--:|
| 1 | 2 |
| 3 |
| 4 | 5 | 6 |
"""


async def test_markdown_becomes_elements(tab):
    async with serving(lambda _: MARKDOWN) as server:
        page = await tab(server)
        await ask(page, "show")
        text = page.locator(".answer .text")
        assert await text.evaluate("(node) => [...node.children].map((child) => child.localName)") == [
            "h3", "p", "ol", "blockquote", "div", "div",
        ]  # fmt: skip
        assert await text.locator("p strong").inner_text() == "bold and slanted"
        assert await text.locator("p em").all_inner_texts() == ["and"]
        assert await text.locator("p code").inner_text() == "a*b*c"
        assert await text.locator("a").get_attribute("href") == "https://example.org/a_(b)"
        assert await text.locator("ol > li").count() == 2
        assert await text.locator("ol > li > ul > li").inner_text() == "inner"
        assert await text.locator("pre").inner_text() == 'print("<b>")'
        assert await text.locator("td").all_inner_texts() == ["1", "2", "3", "4", "5"]


async def test_markdown_takes_texts_that_are_nothing_but_marks(tab):
    async with serving() as server:
        page = await tab(server)
        parse = """async (texts) => {
          const { parseBlocks, parseInline } = await import("/page/markdown.mjs");
          const letters = (node) => node.text ?? node.children?.map(letters).join("") ?? (node.kind ? "" : node);
          const shown = (text) => parseBlocks(text).flatMap((block) => parseInline(block.text ?? "")).map(letters);
          return texts.map((text) => shown(text).join(""));
        }"""
        pieces = [*"* _ [ ]( ` ![ | ~~~ < \\ a".split(), "**a ", "> ", "- ", "1. ", "|-\n", "\n", " "]
        seeded = random.Random(1)
        texts = [piece * (20_000 // len(piece)) for piece in pieces]
        texts += ["".join(seeded.choices(pieces, k=300)) for _ in range(200)]
        shown = await page.evaluate(parse, texts)
        assert len(shown) == len(texts)
        for piece in ("a", "<", "["):
            assert shown[pieces.index(piece)] == texts[pieces.index(piece)]


LONG_TEXTS = {
    "a wide table": lambda size: "\n".join(piece * (size // 6) for piece in ("|a", "|-", "|b")),
    "a wide table of short rows": lambda size: "\n".join(["|a" * (size // 6), "|-" * (size // 6), "|\n" * (size // 6)]),
    "growing runs": lambda size: "a".join("`" * length for length in range(1, int((2 * size) ** 0.5))),
} | {
    piece: lambda size, piece=piece: piece * (size // len(piece))
    for piece in [
        "# a|b\n-|-\n", "> > > > > > -|-\n", "- a|b\n|-|-\n", "a|b\n", "- a\n  - b\n", "1. a\n\n   b\n", "```\n~~~\n",
        "[a](", "[*a](b) ", "[" * 40 + "](x ", "*a **b ***c _d __e ~~f `g ", "http://a ", "\\",
    ]
}  # fmt: skip
WORK = """async (texts) => {
  const { parseBlocks, parseInline } = await import("/page/markdown.mjs?counted");
  const inline = ({ text, items, blocks, head, rows }) => [
    text ?? [], head ?? [], rows ?? [], (items ?? []).map((item) => item.map(inline)), (blocks ?? []).map(inline),
  ].flat(Infinity);
  for (const text of texts) for (const part of parseBlocks(text).flatMap(inline)) parseInline(part);
}"""


async def test_the_work_of_markdown_grows_no_faster_than_the_text(tab):
    async with serving() as server:
        page = await tab(server)
        profiler = await page.context.new_cdp_session(page)
        await profiler.send("Profiler.enable")
        await profiler.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})

        async def work(texts: list[str]) -> int:
            """How many blocks of markdown.mjs are executed."""
            await profiler.send("Profiler.takePreciseCoverage")
            await page.evaluate(WORK, texts)
            found = (await profiler.send("Profiler.takePreciseCoverage"))["result"]
            [functions] = [script["functions"] for script in found if script["url"].endswith("?counted")]
            return sum(part["count"] for function in functions for part in function["ranges"])

        await work([])
        for name, text in LONG_TEXTS.items():
            once, fourfold = await work([text(3_000)]), await work([text(12_000)])
            assert 1_000 < once < fourfold < 5 * once, name


async def test_a_reload_keeps_the_conversation_until_it_is_deleted(tab):
    async with serving(lambda messages: f"{len(messages)} turns, {sizes(messages)}") as server:
        page = await tab(server)
        await page.locator("#files").set_input_files([png(40, 30)])
        await expect(page.locator("#pictures img")).to_have_count(1)
        await ask(page, "one")
        await page.reload()
        await expect(page.locator(".answer .text")).to_have_text("1 turns, 40x30")
        await expect(page.locator(".question img")).to_have_count(1)
        await expect(page.locator("#figures")).to_contain_text("First event")
        assert await ask(page, "two") == "3 turns, no picture"
        await page.get_by_role("button", name="New conversation").click()
        await page.get_by_role("button", name="Keep it").click()
        await expect(page.locator(".answer")).to_have_count(2)
        await page.get_by_role("button", name="New conversation").click()
        await page.get_by_role("button", name="Delete it").click()
        await expect(page.get_by_text("Ask something, or show a picture.")).to_be_visible()
        await page.reload()
        await page.locator("body[data-ready]").wait_for()
        await expect(page.locator("#messages > li")).to_have_count(0)
        assert await ask(page, "three") == "1 turns, no picture"


async def test_what_has_come_of_an_answer_outlives_the_page(tab):
    model = ScriptedModel(answer=lambda _: "abcdefgh", hold_at=5)
    async with serving(model=model) as server:
        page = await tab(server)
        await send(page, "go")
        await expect(page.locator(".arriving .text")).to_have_text("abc")
        job = await server.held()
        await page.reload()
        await expect(page.locator(".answer .text")).to_have_text("abc")
        await expect(page.get_by_role("alert")).to_contain_text("complete")
        await server.until(lambda: job.cancelled)
        model.gate.set()
        await page.get_by_role("button", name="Try again").click()
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("abcdefgh")
        assert model.dropped == 1


HIDE = """() => {
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_tabs_have_one_conversation_and_undo_nothing_of_each_other(tab):
    model = ScriptedModel()
    async with serving(model=model) as server:
        one = await tab(server)
        other = await tab(server, beside=one)

        async def both_show(*texts: str) -> None:
            for page in (one, other):
                await expect(page.locator("#messages .text")).to_have_text(texts)

        await ask(other, "a1")
        await both_show("a1", "a1")
        await one.evaluate(HIDE)
        await other.reload()
        await both_show("a1", "a1")
        await ask(one, "b2")
        await both_show("a1", "a1", "b2", "b2")

        model.hold_at = model.begun + 3
        await send(one, "c3")
        await expect(one.locator(".arriving .text")).to_have_text("c")
        await expect(other.get_by_text("This message has not been answered yet.")).to_be_visible()
        await one.evaluate(HIDE)
        await expect(other.get_by_role("alert")).to_have_text(re.compile("This answer is not complete"))
        await send(other, "d4")
        await expect(one.locator(".question")).to_have_count(4)
        await expect(one.get_by_role("button", name="Try again")).to_have_count(0)
        await server.until(lambda: server.engine.queued == 1)
        model.gate.set()
        await both_show("a1", "a1", "b2", "b2", "c3", "c3", "d4", "d4")
        await one.reload()
        await both_show("a1", "a1", "b2", "b2", "c3", "c3", "d4", "d4")

        model.hold_at = model.begun + 3
        await send(one, "e5")
        await expect(one.locator(".arriving .text")).to_have_text("e")
        job = await server.held()
        await other.get_by_role("button", name="New conversation").click()
        await other.get_by_role("button", name="Delete it").click()
        await expect(one.locator("#messages > li")).to_have_count(0)
        await expect(one.get_by_role("button", name="Send")).to_be_visible()
        await server.until(lambda: job.cancelled)
        model.gate.set()
        await server.idle()
        assert model.dropped == 1
        assert await ask(one, "f6") == "f6"
        await both_show("f6", "f6")


HOLD_STORE = """async () => {
  const opening = indexedDB.open("kestrel-jax");
  await new Promise((opened) => opening.addEventListener("success", opened));
  const store = opening.result.transaction("turns", "readwrite").objectStore("turns");
  const hold = () => window.released || (store.count().onsuccess = hold);
  hold();
}"""


async def test_a_message_waits_for_the_conversation_that_it_belongs_to(tab):
    async with serving(lambda messages: f"{len(messages)} turns") as server:
        one = await tab(server)
        await ask(one, "first")
        await one.evaluate(HOLD_STORE)
        other = await tab(server, beside=one, wait=False)
        await send(other, "second")
        await expect(other.locator("#server")).to_have_text("scripted ready")
        await expect(other.get_by_role("textbox", name="Message")).to_have_value("second")
        await one.evaluate("window.released = true")
        texts = ["first", "1 turns", "second", "3 turns"]
        await expect(other.locator("#messages .text")).to_have_text(texts)
        await other.reload()
        await expect(other.locator("#messages .text")).to_have_text(texts)


async def test_a_browser_that_keeps_nothing(tab):
    async with serving(lambda messages: f"{len(messages)} turns") as server:
        page = await tab(server)
        await page.add_init_script("IDBFactory.prototype.open = () => { throw new Error('no'); }")
        await page.reload()
        await page.locator("body[data-ready]").wait_for()
        assert await ask(page, "first") == "1 turns"
        await send_in_vain(page, server, "second")
        await page.get_by_role("button", name="Edit message").click()
        assert await ask(page, "third") == "3 turns"
        await page.reload()
        await page.locator("body[data-ready]").wait_for()
        await expect(page.locator("#messages > li")).to_have_count(0)


async def test_a_conversation_can_be_deleted_while_an_answer_arrives(tab):
    model = ScriptedModel(hold_at=4)
    async with serving(model=model) as server:
        page = await tab(server)
        await send(page, "first")
        await expect(page.locator(".arriving .text")).to_have_text("fi")
        await page.get_by_role("button", name="New conversation").click()
        await page.get_by_role("button", name="Delete it").click()
        await expect(page.locator("#messages > li")).to_have_count(0)
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        model.gate.set()
        await server.idle()
        assert await ask(page, "second") == "second"
        await expect(page.locator("#messages > li")).to_have_count(2)


async def test_settings_are_kept_and_sent(tab):
    conversations = []
    async with serving(lambda messages: conversations.append(messages) or "0123456789") as server:
        page = await tab(server)
        await page.get_by_role("button", name="Settings").click()
        for name, value in {"Temperature": "0.7", "Top p": "1.5", "Most tokens": "4", "Seed": "42"}.items():
            await page.get_by_label(name).fill(value)
        await page.get_by_label("System prompt").fill("Be brief.")
        await expect(page.get_by_text("Not used: this should be a number above 0, up to 1.")).to_be_visible()
        await page.get_by_role("button", name="Done").click()
        await page.reload()
        await page.locator("body[data-ready]").wait_for()
        assert await ask(page, "count") == "0123"
        await expect(page.locator(".answer .foot")).to_contain_text("Ended at the limit of tokens.")
        [sampling] = server.model.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 1.0, 42)
        assert conversations[0][0] == {"role": "system", "content": "Be brief."}
        await page.get_by_role("button", name="Settings").click()
        await expect(page.get_by_label("Temperature")).to_have_value("0.7")
        await page.get_by_role("button", name="Leave all to the server").click()
        await page.keyboard.press("Escape")
        assert await ask(page, "count") == "0123456789"


async def test_tabs_have_the_same_settings(tab):
    async with serving() as server:
        one = await tab(server)
        other = await tab(server, beside=one)
        for page, name, value in ((one, "Temperature", "0.7"), (other, "Seed", "42")):
            await page.get_by_role("button", name="Settings").click()
            await page.get_by_label(name).fill(value)
            await expect((other if page is one else one).locator(f"#setting-{name.lower()}")).to_have_value(value)
        await other.get_by_role("button", name="Done").click()
        await ask(other, "hello")
        [sampling] = server.model.sampling
        assert (sampling.temperature, sampling.seed) == (0.7, 42)


async def test_keyboard_alone(tab):
    async with serving() as server:
        page = await tab(server)
        message = page.get_by_role("textbox", name="Message")
        await expect(message).to_be_focused()
        await page.keyboard.type("line one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("line two")
        await page.keyboard.press("Enter")
        await expect(page.locator(".answer:not(.arriving) .text")).to_have_text("line oneline two")
        await expect(message).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("button", name="Add pictures")).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("button", name="Send")).to_be_focused()
        await page.get_by_role("button", name="Settings").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog", name="Settings")).to_be_hidden()
        await expect(page.get_by_role("button", name="Settings")).to_be_focused()
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")  # closes the timeline, which a wide page starts with
        await expect(page.get_by_role("complementary", name="Event timeline")).to_be_hidden()
        await page.get_by_role("button", name="Show the timeline of this answer").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="Event timeline")).to_be_focused()


async def test_every_control_has_a_name(tab):
    async with serving(lambda _: MARKDOWN) as server:
        page = await tab(server)
        await ask(page, "show")
        for dialog in (None, "Settings"):
            if dialog:
                await page.get_by_role("button", name=dialog).click()
            snapshot = await page.locator("body").aria_snapshot()
            controls = re.findall(r"- (?:button|textbox|spinbutton|link|img|region|group|list)\b.*", snapshot)
            nameless = [line for line in controls if not re.search(r'"|list|group', line)]
            assert len(controls) > 5
            assert not nameless, snapshot


async def test_the_timeline_and_its_files(tab):
    async with serving(lambda _: "0123456789") as server:
        page = await tab(server)
        await ask(page, "count")
        await expect(page.locator("#chart-bars svg text")).to_have_text("9")
        paths = await page.locator("#chart-bars path").evaluate_all("all => all.map((path) => path.getAttribute('d'))")
        assert sum(path.count("M") for path in paths) == 9
        drawing = page.get_by_role("img", name=re.compile("First event after .*documented: 130 ms"))
        await expect(drawing).to_be_visible()
        await expect(page.locator("#server-metrics")).to_contain_text("n_tokens11")
        await page.get_by_text("All events").click()
        kinds = ["role", *["token"] * 10, "finish", "metrics", "usage", "done"]
        await expect(page.locator("#event-rows td:first-child")).to_have_text(kinds)

        saved = json.loads(await saved_file(page, "Save as JSON"))
        assert saved["documented"] == {"first_event_ms": 130, "token_ms": 50}
        assert [event["kind"] for event in saved["events"]] == kinds
        moments = [event["ms"] for event in saved["events"]]
        assert moments == sorted(moments)
        assert saved["metrics"]["n_tokens"] == saved["usage"]["completion_tokens"] == 11
        assert len(saved["summary"]["gaps"]) == 9

        svg = await saved_file(page, "Save as SVG")
        root = ET.fromstring(svg)
        names = [node.tag.removeprefix("{http://www.w3.org/2000/svg}") for node in root.iter()]
        assert names[:3] == ["svg", "title", "style"]
        assert sum(node.get("d", "").count("M") for node in root.iter()) == 9
        assert {"130 ms", "50 ms"} <= {node.text for node in root.iter() if node.tag.endswith("text")}


async def saved_file(page: Page, button: str) -> str:
    async with page.expect_download() as download:
        await page.get_by_role("button", name=button).click()
    return Path(await (await download.value).path()).read_text()


async def test_thinking_is_shown_apart(tab):
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}]
    frames = [{"choices": [{"delta": delta}]} for delta in deltas] + [
        {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    ]
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    async with serving() as server:
        page = await tab(server)
        await page.route("**/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        assert await ask(page, "well?") == "yes"
        await page.get_by_text("Thinking").click()
        await expect(page.locator(".thinking .plain")).to_have_text("hm")


async def test_frames_split_anywhere_are_read_alike(tab):
    stream = (
        "\ufeff: a comment\n\ndata: {\"a\": \"é😀\"}\r\n\r\ndata:two\r\ndata: lines\r\revent: x\nid: 3\n\n"
        "retry: 5\ndata\n\ndata:  spaced\n\ndatabase: no\n\ndata: [DONE]\n\ndata: unfinished\n"
    ).encode()  # fmt: skip
    events = [
        {"kind": "comment", "text": "a comment"},
        *({"kind": "data", "data": data} for data in ('{"a": "é😀"}', "two\nlines", "", " spaced", "[DONE]")),
    ]
    read = """async ([bytes, splits]) => {
      const { EventStreamParser } = await import("/page/event_stream.mjs");
      return splits.map((cuts) => {
        const parser = new EventStreamParser();
        const ends = [...cuts, bytes.length];
        return ends.flatMap((end, index) => parser.push(Uint8Array.from(bytes.slice(ends[index - 1] ?? 0, end))));
      });
    }"""
    seeded = random.Random(2)
    splits = [[], *([at] for at in range(len(stream) + 1)), list(range(len(stream)))]
    splits += [sorted(seeded.choices(range(len(stream)), k=seeded.randrange(8))) for _ in range(300)]
    async with serving() as server:
        page = await tab(server)
        for cuts, found in zip(splits, await page.evaluate(read, [list(stream), splits]), strict=True):
            assert found == events, cuts


WIDE = (
    "A wide table and wide code:\n\n|"
    + "column|" * 20
    + "\n|"
    + "-|" * 20
    + "\n\n```\n"
    + "x" * 300
    + "\n```\n"
    + "y" * 300
)


async def test_a_phone_shows_everything_within_its_width(tab):
    async with serving(lambda _: WIDE) as server:
        page = await tab(server, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        await expect(page.get_by_role("complementary", name="Event timeline")).to_be_hidden()
        await ask(page, "z" * 200)
        overflow = "document.scrollingElement.scrollWidth - innerWidth"
        assert await page.evaluate(overflow) <= 0
        await page.get_by_role("button", name="Timeline", exact=True).click()
        await expect(page.get_by_role("complementary", name="Event timeline")).to_be_visible()
        assert await page.evaluate(overflow) <= 0
        conversation = page.locator("#conversation")
        assert await conversation.evaluate("(node) => node.scrollWidth - node.clientWidth") <= 0


CONTRASTS = """() => {
  const parsed = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (channel) => (channel /= 255) <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const ground = (node) => {
    const color = parsed(getComputedStyle(node).backgroundColor);
    return color.length === 3 || color[3] === 1 || !node.parentElement ? color : ground(node.parentElement);
  };
  const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  return [...document.querySelectorAll("body *")].filter((node) => own(node) && node.checkVisibility()).map((node) => {
    const style = getComputedStyle(node);
    const text = luminance(parsed(node.namespaceURI.endsWith("svg") ? style.fill : style.color));
    const [high, low] = [text, luminance(ground(node))].sort((a, b) => b - a);
    return [node.textContent.slice(0, 40), (high + 0.05) / (low + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_from_its_ground_as_wcag_aa_wants(tab, scheme):
    async with serving(lambda _: MARKDOWN) as server:
        page = await tab(server, color_scheme=scheme)
        first = await page.evaluate(CONTRASTS)
        await ask(page, "show")
        server.engine.state = "draining"
        await send(page, "and fail")
        await expect(page.get_by_role("alert")).to_be_visible()
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Seed").fill("0.5")
        ratios = first + await page.evaluate(CONTRASTS)
        assert len(ratios) > 50
        assert not [(text, ratio) for text, ratio in ratios if ratio < 4.5]


async def test_the_page_can_be_photographed(tmp_path):
    files = [tmp_path / "shown.png", tmp_path / "page.png"]
    files[0].write_bytes(png(40, 30)["buffer"])
    async with serving(sizes) as server:
        questions = ["--question", "one", "--question", "two", "--picture", str(files[0])]
        await take(parsed([str(files[1]), "--url", server.url, "--width", "900", "--height", "600", *questions]))
        assert server.engine.total_requests == 2
    with Image.open(files[1]) as picture:
        assert (picture.format, picture.size) == ("PNG", (900, 600))
        assert len(picture.getcolors()) > 20
