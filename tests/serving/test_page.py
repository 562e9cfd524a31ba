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
    """Opens a tab of its own for a server; the page must report no error of its own in it."""
    contexts, complaints = [], []

    async def opened(server, **options) -> Page:
        contexts.append(await browser.new_context(base_url=server.url, **options))
        page = await contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        await page.goto("/")
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
    parts = [part["image"].size for part in content if part["type"] == "image"] if isinstance(content, list) else []
    return ", ".join(f"{width}x{height}" for width, height in parts) or "no picture"


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
        if way == "button":
            await page.get_by_role("button", name="Stop").click()
        else:
            await page.keyboard.press("Escape")
        await expect(page.locator(".answer .foot")).to_contain_text("Stopped.")
        await expect(page.get_by_role("textbox", name="Message")).to_be_focused()
        model.gate.set()
        await server.until(lambda: model.dropped == 1)
        await server.idle()
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
        assert await text.locator("td").all_inner_texts() == ["1", "2"]


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
        kinds = await page.locator("#event-rows td:first-child").all_inner_texts()
        assert kinds == ["role", *["token"] * 10, "finish", "metrics", "usage", "done"]

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
