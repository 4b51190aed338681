"""A headless Chromium, driven over its DevTools protocol through a pair of pipes: no driver package, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).with_name("debian_packages.txt")  # .ci/run installs them
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
_ANSWER_SECONDS = 60.0


class Browser:
    """One page of a Chromium. `events`: its messages so far, such as console messages and requests."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to, self._read_from = write_to, read_from
        self._rest, self._last, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol; returns its result."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._write_to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._last:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, in pixels; `events` then has only messages from here on."""
        self.events.clear()
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete' && document.documentElement.dataset.ready === 'true'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, once it is resolved."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for a JavaScript condition."""
        end = time.monotonic() + _ANSWER_SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}; events: {self.problems()}"
            time.sleep(0.05)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse to a point of an element, which is scrolled into view; `across` and `down`: fractions of its size."""
        place = self.run(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "element.scrollIntoView({block: 'center', behavior: 'instant'}); const box = element.getBoundingClientRect();"
            f"return [box.left + box.width * {across}, box.top + box.height * {down}]; }})()"
        )
        for nudge in (-3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] + nudge, y=place[1])

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of what is in the window, or of the complete page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Errors and warnings that the page has caused, in its console or anywhere else."""
        self.call("Page.getFrameTree")  # all messages before this answer have arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params)))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(str(params["entry"]))
        return found

    def requests(self) -> list[str]:
        """The addresses of everything that the page has asked for."""
        self.call("Page.getFrameTree")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_from], [], [], _ANSWER_SECONDS)
            assert ready, f"Chromium has not answered for {_ANSWER_SECONDS:g} s"
            part = os.read(self._read_from, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A Chromium whose user data are in `profile`, a new folder."""
    assert BROWSER is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # Chromium reads commands from its file descriptor 3 and answers on its file descriptor 4.
    command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "-", BROWSER, *_FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(to_write, from_read)
    finally:
        os.close(to_write)  # Chromium ends with its pipe
        os.close(from_read)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
