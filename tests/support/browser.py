"""Control Chromium through its debugging pipe, without other packages.

Messages are JSON objects that end with NUL. The browser reads them on descriptor 3 and writes on 4.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Browser:
    """One headless Chromium with one page; a context manager."""

    def __init__(self, *, width: int = 1440, height: int = 1000) -> None:
        assert PROGRAM, "no chromium"
        self.events: list[dict[str, Any]] = []
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        to_browser, from_browser = os.pipe(), os.pipe()
        ours = (to_browser[1], from_browser[0])
        # Copy to high numbers first, because 3 and 4 may be in use as one of these descriptors.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (to_browser[0], from_browser[1])]
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            preexec_fn=lambda: [os.dup2(fd, number) for fd, number in zip(theirs, (3, 4), strict=True)],
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in theirs:
            os.close(fd)
        self._write, self._read = os.fdopen(ours[0], "wb", buffering=0), os.fdopen(ours[1], "rb")
        self._number, self._session, self._rest = 0, "", b""
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._write.close()
        self._read.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command of the DevTools protocol; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path) -> None:
        """Load a file and wait until its script has run."""
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Load a page and wait until its script has run."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """Evaluate an expression in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def resize(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def screenshot(self, path: Path, *, full_page: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read.fileno(), 1 << 20)
            assert piece, "the browser has exited"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
