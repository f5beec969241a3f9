"""A headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT_S = 60.0
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")


class Tab:
    """One tab. Errors of scripts and of the console are collected in ``errors``."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._count = 0
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        self._count += 1
        await self._socket.send_message(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(await self._socket.get_message())
            self._note(message)
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: Any) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        # A request that fails while a server is away is one of source "network".
        elif message.get("method") == "Log.entryAdded" and params["entry"]["source"] not in ("network", "other"):
            self.errors.append(str(params["entry"]))

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise's when it is there."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        with trio.move_on_after(WAIT_S):
            while not await self.evaluate(f"Boolean({script})"):  # noqa: ASYNC110 - of another process
                await trio.sleep(0.02)
            return
        raise AssertionError(f"{script} never was true; the page: {await self.evaluate('document.body.innerText')}")

    async def open(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def click(self, selector: str) -> None:
        """Click the first element of a CSS selector once it is there and enabled."""
        found = json.dumps(selector)
        await self.wait_for(f"document.querySelector({found}) && !document.querySelector({found}).disabled")
        await self.evaluate(f"document.querySelector({found}).click()")

    async def text(self, selector: str = "body") -> str:
        """Return the text of an element as it is shown."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the window, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def prefer(self, scheme: str) -> None:
        """Set the color scheme that the reader prefers: ``dark`` or ``light``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        """Return what is shown as a PNG file."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """Start a browser with one empty tab; it ends with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--ignore-certificate-errors", "--remote-debugging-port=0"),
            *(f"--user-data-dir={directory}", "about:blank"),
        ]
        browser = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = await _url_of_tab(trio.Path(directory, "DevToolsActivePort"))
            async with open_websocket_url(url, max_message_size=64 << 20) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.resize(1280, 900)
                yield tab
        finally:
            browser.terminate()
            with trio.CancelScope(shield=True):
                await browser.wait()


async def _url_of_tab(port_file: trio.Path) -> str:
    with trio.fail_after(WAIT_S):
        while not (await port_file.exists() and "\n" in await port_file.read_text()):  # noqa: ASYNC110 - of the browser
            await trio.sleep(0.02)
        port = (await port_file.read_text()).split("\n")[0]
        while True:
            listed = await trio.to_thread.run_sync(_get, f"http://127.0.0.1:{port}/json/list")
            for target in json.loads(listed):
                if target["type"] == "page":
                    return str(target["webSocketDebuggerUrl"])
            await trio.sleep(0.02)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        content: bytes = answer.read()
        return content
