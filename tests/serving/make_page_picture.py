"""A picture of the page with an answer of a running server: `python -m tests.serving.make_page_picture page.png`."""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from .browser import launched

ANSWER_MS = 300_000
COLOURS = 128


async def take(options: argparse.Namespace) -> None:
    """Asks every question in turn, with the pictures beside the last one, and photographs the page."""
    async with launched() as browser:
        size = {"width": options.width, "height": options.height}
        page = await browser.new_page(viewport=size, color_scheme=options.scheme)
        await page.goto(options.url)
        await page.locator("body[data-ready]").wait_for()
        for number, question in enumerate(options.question):
            if number == len(options.question) - 1 and options.picture:
                await page.locator("#files").set_input_files(options.picture)
                await page.locator("#pictures img").nth(len(options.picture) - 1).wait_for()
            await page.get_by_role("textbox", name="Message").fill(question)
            await page.keyboard.press("Enter")
            await page.locator(".answer:not(.arriving)").nth(number).wait_for(timeout=ANSWER_MS)
        await page.locator('#server[data-state="ready"]').wait_for()
        shot = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    # A palette halves the file, and the page has few colours.
    shot.quantize(COLOURS, dither=Image.Dither.NONE).save(options.file, optimize=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.serving.make_page_picture", description=__doc__)
    parser.add_argument("file", type=Path, help="the PNG to write")
    parser.add_argument("--url", default="http://127.0.0.1:8000/", help="the page of a running server")
    parser.add_argument("--question", action="append", help="may be repeated; all are asked in one conversation")
    parser.add_argument("--picture", action="append", type=Path, default=[], help="sent with the last question")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280, help="CSS pixels")
    parser.add_argument("--height", type=int, default=800, help="CSS pixels")
    options = parser.parse_args(arguments)
    options.question = options.question or ["从1数到20"]
    return options


if __name__ == "__main__":
    asyncio.run(take(parsed()))
