"""Chromium without a window, driven over a pipe by its DevTools protocol. It needs no package."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
OPTIONS = "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
SECONDS = 60.0  # a limit for what a page should do


class Browser:
    """A browser with one page. It reads commands from one pipe and writes results to another."""

    def __init__(self, commands: int, results: BinaryIO) -> None:
        self._commands = commands
        self._results = results
        self._number = 0
        self._page: dict[str, str] = {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._page = {"sessionId": attached["sessionId"]}

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol, and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters, **self._page}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._read()).get("id") != self._number:
            pass  # This is an event, which nobody waits for.
        assert "error" not in message, message
        return message["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._results.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        return json.loads(text)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, self.value("document.body.innerText")
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def type(self, text: str) -> None:
        """Type a text where the focus is. A page's `autofocus` sets the focus only after it has loaded."""
        self.wait_for("document.activeElement !== document.body")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key, such as "Enter" or "Escape"."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", **event, **(text if kind == "keyDown" else {}))

    def show(self, *, width: int, scheme: str) -> None:
        """Set the width of the page, and the colours that its reader prefers ("light" or "dark")."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in a folder."""
    commands_out, commands_in = os.pipe()
    results_out, results_in = os.pipe()
    line = f"exec {CHROMIUM} {OPTIONS} --user-data-dir={profile} 3<&{commands_out} 4>&{results_in}"
    process = subprocess.Popen(
        ["bash", "-c", line], pass_fds=(commands_out, results_in), stderr=subprocess.DEVNULL
    )
    os.close(commands_out)
    os.close(results_in)
    try:
        with os.fdopen(results_out, "rb") as results:
            yield Browser(commands_in, results)
    finally:
        os.close(commands_in)  # The browser ends when its pipe does.
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
