"""An editor's language server resolves the links next to a learner's file, like the compiler."""

import json
import subprocess
import sys
from pathlib import Path

from typed import unwrap

from harness.learner import blanks

ROOT = Path(__file__).resolve().parents[2]


class LanguageServer:
    """Client of Mojo's language server over pipes."""

    def __init__(self):
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("mojo-lsp-server")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.stdin, self.stdout = unwrap(self.process.stdin), unwrap(self.process.stdout)

    def send(self, method: str, params: dict, **extra) -> None:
        body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **extra}).encode()
        self.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.stdin.flush()

    def receive(self, is_expected) -> dict:
        """Return the next message for which `is_expected` is true."""
        while True:
            length = self.stdout.readline()
            assert length.startswith(b"Content-Length:"), "the language server ended"
            while self.stdout.readline().strip():
                pass
            message = json.loads(self.stdout.read(int(length.split(b":")[1])))
            if is_expected(message):
                return message


def test_language_server_follows_links(tmp_path):
    blanks.generate_problems(ROOT / "solutions", tmp_path / "problems")
    file = tmp_path / "problems" / "p22" / "op" / "layernorm_linear.mojo"
    server = LanguageServer()
    try:
        server.send("initialize", {"processId": None, "rootUri": None, "capabilities": {}}, id=1)
        server.receive(lambda message: message.get("id") == 1)
        server.send("initialized", {})
        text = file.read_text()
        document = {"uri": file.as_uri(), "languageId": "mojo", "version": 1, "text": text}
        server.send("textDocument/didOpen", {"textDocument": document})
        notification = server.receive(
            lambda message: message.get("method") == "textDocument/publishDiagnostics"
        )
        errors = [
            diagnostic["message"]
            for diagnostic in notification["params"]["diagnostics"]
            if diagnostic["severity"] == 1
        ]
        assert not errors
        before = text[: text.index("row_statistics(input")]
        position = {"line": before.count("\n"), "character": len(before.rsplit("\n", 1)[-1])}
        location = {"textDocument": {"uri": file.as_uri()}, "position": position}
        server.send("textDocument/definition", location, id=2)
        (definition,) = server.receive(lambda message: message.get("id") == 2)["result"]
        assert definition["uri"].endswith("/shared/common.mojo")
    finally:
        server.process.kill()
        server.process.wait()
