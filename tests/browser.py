"""A headless Chromium by its own debugging pipe: what the browser tests need of it, without a package.

with Browser() as page:
    page.open(file, width=360, dark=True)
    page.run("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60
WATCH = """
window.__shift = 0;
new PerformanceObserver((list) => { for (const one of list.getEntries()) window.__shift += one.value; })
  .observe({ type: "layout-shift", buffered: true });
"""
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Tab": 9, " ": 32}


def chromium() -> str | None:
    """Where one is installed; CHROMIUM=PATH names another."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. errors: what its console and its exceptions said, and what it asked the network for."""

    def __init__(self):
        self.errors: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        down, up = os.pipe(), os.pipe()

        def pipes() -> None:  # commands come on 3, answers go out on 4
            ours = [os.dup(os.dup(fd)) for fd in (down[0], up[1])]  # out of the way of 3 and 4
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            [chromium(), *words, f"--user-data-dir={self._profile.name}", "about:blank"],
            stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=pipes,
        )  # fmt: skip
        os.close(down[0])
        os.close(up[1])
        self._to, self._from = down[1], up[0]
        self._number, self._rest, self._session = 0, b"", None
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(self, file: Path, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        phone = width < 600
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self._loaded = False
        self._call("Page.navigate", url=file.resolve().as_uri())
        self._until(lambda: self._loaded)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")

    def run(self, script: str):
        """The value of an expression, a promise's when it is there."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 * shift}
        if key == "Enter":
            about["text"] = "\r"
        self._call("Input.dispatchKeyEvent", type="keyDown", **about)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def move(self, selector: str, click: bool = False) -> None:
        """The mouse to the middle of an element, which is scrolled to."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(() => {{ const r = {where}.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2] }})()"
        )
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, whole: bool = True) -> Path:
        found = self._call(
            "Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": self._clip()} if whole else {})
        )
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def _clip(self) -> dict:
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}

    def _call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answers: list[dict] = []
        self._until(lambda: answers, lambda said: said.get("id") == self._number and answers.append(said))
        assert "error" not in answers[0], answers[0]["error"]
        return answers[0]["result"]

    def _until(self, done, hear=lambda said: None) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser doesn't answer"
            *messages, self._rest = (self._rest + os.read(self._from, 1 << 20)).split(b"\0")
            for message in map(json.loads, messages):
                hear(message)
                self._note(message)

    def _note(self, said: dict) -> None:
        about = said.get("params", {})
        match said.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.errors.append(str(about["args"]))
            case "Log.entryAdded":
                self.errors.append(str(about["entry"]))
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("file:", "data:")):
                self.errors.append(f"asked for {about['request']['url']}")
