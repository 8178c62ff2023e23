"""Headless Chromium, where this machine has it, driven over the pipe of its own DevTools protocol.

Blocking and plain: one page, one command at a time, what the console said kept in a list.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",  # tests may run as root, and open nothing but the page under test
    "--disable-gpu",
    "--hide-scrollbars",  # a picture of the whole page has none
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_COMMAND_S: Final = 30.0


def lacking() -> str | None:
    """Why there is no browser, if so: nobody installed one, or not whole."""
    if CHROMIUM is None:
        return "needs Chromium: scripts/test-packages browser"
    try:
        subprocess.run([CHROMIUM, "--version"], capture_output=True, timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"Chromium does not start: {error}"
    return None


class Browser:
    """Context manager of one page. ``problems`` are the console's errors and warnings, and uncaught exceptions."""

    def __init__(self) -> None:
        assert CHROMIUM is not None, "no Chromium"
        self.problems: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="mm-browser-", dir="/tmp")
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        command = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read_end, write_end),
        )
        os.close(read_end)
        os.close(write_end)
        self._rest = b""
        self._number = 0
        self._session = ""

    def __enter__(self) -> "Browser":
        try:
            pages = self._do("Target.getTargets")["targetInfos"]
            target = next(page["targetId"] for page in pages if page["type"] == "page")
            self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._do(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    def open(self, url: str) -> None:
        """Returns when the page and its files are loaded."""
        answer = self._do("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def size(self, width: int, height: int) -> None:
        """Of the window, in CSS pixels."""
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """*name*: light or dark."""
        self._do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def press_enter(self) -> None:
        """Where the focus is."""
        for kind, text in (("keyDown", "\r"), ("keyUp", "")):
            self._do(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text=text
            )

    def write(self, text: str) -> None:
        """Type *text* where the focus is."""
        self._do("Input.insertText", text=text)

    def point_at(self, selector: str, share: float) -> None:
        """Move the mouse over an element, to *share* of its width."""
        box = self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + share * box["width"], box["y"] + box["height"] / 2
        self._do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def value(self, script: str) -> Any:
        """What the JavaScript expression *script* is, or resolves to."""
        answer = self._do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, *, timeout_s: float = 40.0) -> Any:
        """The first true value of *script*."""
        return self._until(lambda: self.value(script), timeout_s, script)

    def _until(self, look: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := look()):
            if time.monotonic() > deadline_s:
                shown = self.value("document.body.innerText")
                raise AssertionError(f"waited {timeout_s:g} s for {what}; the page shows:\n{shown}")
            time.sleep(0.05)
        return found

    def picture(self, file: Path) -> None:
        """The whole page, as PNG, however far it goes below the window."""
        size = self._do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {**size, "scale": 1}
        shot = self._do("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _do(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _COMMAND_S
        while True:
            answer = self._receive(deadline_s, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline_s: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, f"Chromium gave no answer to {method}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([one.get("value") for one in params["args"]]))
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _end(self) -> None:
        os.close(self._to)  # ends it
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)
