"""A real browser for the page: Debian's chromium or Chrome, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next((path for path in map(shutil.which, NAMES) if path), None)
LAUNCH_MS = 120_000  # the machine may be busy with something else
WHY_NOT = "the page is not tested, because there is no Chromium here; `apt-get install chromium` would enable it"


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """A headless browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=EXECUTABLE, timeout=LAUNCH_MS)
        try:
            yield browser
        finally:
            await browser.close()
