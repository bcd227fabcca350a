"""A package index in memory on the loopback interface: what uploads are rehearsed against. Not for anything else.

It speaks the two halves that a release needs: the upload form (fields and one file, as multipart) and the simple pages.
"""

import email
import email.policy
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote


class LocalIndex:
    """Runs while its block does."""

    def __init__(self) -> None:
        """Listen on a free port; nothing is answered before `__enter__`."""
        self._files: dict[str, bytes] = {}
        files = self._files

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                name, content, digest = _uploaded(self.headers["Content-Type"], body)
                if name in files and files[name] != content:
                    self._answer(400, b"File already exists")
                elif digest and hashlib.sha256(content).hexdigest() != digest:
                    self._answer(400, b"The digest does not fit the file")
                else:
                    files[name] = content
                    self._answer(200, b"")

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = unquote(self.path)
                if path.startswith("/files/"):
                    content = files.get(path.removeprefix("/files/"))
                    self._answer(404 if content is None else 200, content or b"")
                    return
                wanted = path.removeprefix("/simple/").strip("/")
                mine = [name for name in sorted(files) if _project_of(name) == wanted]
                links = "".join(f'<a href="/files/{name}">{name}</a>' for name in mine)
                self._answer(200 if mine else 404, f"<!DOCTYPE html>{links}".encode())

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def upload_url(self) -> str:
        """Where files are posted."""
        return f"{self.url}/legacy/"

    @property
    def simple_url(self) -> str:
        """Where installers look."""
        return f"{self.url}/simple/"

    def names(self) -> list[str]:
        """Files that were uploaded."""
        return sorted(self._files)

    def content(self, name: str) -> bytes:
        """One of them."""
        return self._files[name]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _uploaded(content_type: str, body: bytes) -> tuple[str, bytes, str]:
    """File name, content and SHA-256 of an upload form."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    name, content, digest = "", b"", ""
    for part in message.iter_parts():
        field = part.get_param("name", header="content-disposition")
        value = part.get_payload(decode=True)
        assert isinstance(value, bytes), "a form's parts are bytes"
        if field == "content":
            name, content = part.get_filename() or "", value
        elif field == "sha256_digest":
            digest = value.decode("ascii").strip()
    return name, content, digest


def _project_of(file_name: str) -> str:
    return re.sub(r"[-_.]+", "-", file_name.split("-")[0]).lower()
