"""A headless Chromium, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


def find_browser() -> str | None:
    """``DQUANTCODEC_BROWSER``, or the first Chromium or Chrome on the path; None where there is none."""
    return os.environ.get("DQUANTCODEC_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page at a time; ``events`` are those since the last :meth:`open`."""

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The browser takes commands from descriptor 3 and answers on 4.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", program, *flags, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(commands, answers),
        )
        os.close(commands)
        os.close(answers)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # without its pipe the browser ends by itself
        self._process.wait()
        os.close(self._read)

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Show ``page`` as a browser with a window of ``width`` pixels would, in its light or dark colours."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip: Mapping[str, Any] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has ended"
            self._pending += more
        message, _, self._pending = self._pending.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read


def pixels(png: bytes) -> set[bytes]:
    """The bytes of a PNG's filtered rows, each four by itself: a picture of one colour has a handful."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    rows = zlib.decompress(data)
    return {rows[i : i + 4] for i in range(0, len(rows), 4)}
