"""Headless Chromium for the book's tests: open pages, run JavaScript, collect errors and network requests.

Uses the DevTools protocol over pipes, so only the browser must be installed.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--remote-debugging-pipe",
]  # fmt: skip
DESKTOP, PHONE = (1280, 900), (390, 844)
TIMEOUT = 60  # seconds per response
CODES = {"End": 35, "ArrowRight": 39}
"""Windows key codes of the keys that move a slider."""


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """A browser with a single page that collects `errors` and `requests`."""

    def __init__(self, executable: str):
        self.profile = tempfile.mkdtemp(prefix="book-browser-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:  # the protocol requires the descriptors 3 and 4
            spare = os.dup(from_browser)
            os.dup2(to_browser, 3)
            os.dup2(spare, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._in, False)
        self._buffer, self._next, self._session = b"", 0, None
        self._events: list[dict] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Terminate the browser and remove its profile."""
        self._process.terminate()
        self._process.wait(timeout=TIMEOUT)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters) -> dict:
        """Send a command and return its result.

        Raises RuntimeError if the browser reports an error, TimeoutError if it does not answer.
        """
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            response = self._receive()
            if response.get("id") == self._next:
                if "error" in response:
                    raise RuntimeError(f"{method}: {response['error']['message']}")
                return response["result"]

    def _receive(self) -> dict:
        """Return the next response; store events in `errors`, `requests` and the event list."""
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            try:
                self._buffer += os.read(self._in, 1 << 16)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("the browser does not answer") from None
                time.sleep(0.005)
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._record(message)
        return message

    def _record(self, message: dict) -> None:
        method, details = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(
                details["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(a.get("value", "")) for a in details["args"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.errors.append(details["entry"]["text"])
        elif method:
            self._events.append(message)

    def resize(self, size: tuple[int, int]) -> None:
        """Set the size of the page."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )

    def open(self, page: Path) -> None:
        """Open a file and wait until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()

    def run(self, script: str):
        """Evaluate a JavaScript expression, awaiting promises; raise RuntimeError for an exception."""
        response = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in response:
            raise RuntimeError(response["exceptionDetails"]["exception"].get("description", script))
        return response["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key ("a", "ArrowRight") on the focused element."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=key if len(key) == 1 else "",
                windowsVirtualKeyCode=CODES.get(key, 0),
            )  # fmt: skip

    def wait_for(self, script: str, seconds: float = 20) -> None:
        """Wait until an expression is true; otherwise raise TimeoutError."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.05)
