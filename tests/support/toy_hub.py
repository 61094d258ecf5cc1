"""A hub of one data set on a port of this machine: as much of the hub's HTTP interface as reading its files takes."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "c0ffee" * 6 + "c0ff"


@contextmanager
def hub(folder: Path, name: str = "owner/prefs"):
    """Serves the files of `folder` as the set `name`; yields the address, for HF_ENDPOINT."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def send(self, status, body=b"", **headers):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def entry(self, path):
            file = folder / path
            if file.is_dir():
                return {"type": "directory", "oid": "0", "size": 0, "path": path}
            return {"type": "file", "oid": "0", "size": file.stat().st_size, "path": path}

        def do_GET(self):
            url = unquote(urlparse(self.path).path)
            prefix = re.escape(name)
            if not (found := re.match(rf"/(api/)?datasets/{prefix}(/|$)(.*)", url)):
                self.send(404, b"{}", X_Error_Code="RepoNotFound")
                return
            verb, _, rest = found[3].partition("/")
            revision, _, path = rest.partition("/")
            if revision not in ("", "main", "v1", COMMIT):
                self.send(404, b"{}", X_Error_Code="RevisionNotFound")
            elif verb in ("", "revision"):
                files = [{"rfilename": str(f.relative_to(folder))} for f in folder.rglob("*") if f.is_file()]
                self.json(
                    {
                        "id": name,
                        "sha": COMMIT,
                        "siblings": files,
                        "private": False,
                        "tags": [],
                        "downloads": 0,
                    }
                )
            elif verb == "tree":
                inside = [
                    f for f in (folder / path).glob("**/*" if "recursive=true" in self.path.lower() else "*")
                ]
                if not (folder / path).is_dir():
                    self.send(404, b"{}", X_Error_Code="EntryNotFound")
                    return
                self.json([self.entry(str(f.relative_to(folder))) for f in sorted(inside)])
            elif verb == "paths-info":
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length).decode()
                paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
                self.json([self.entry(p) for p in paths if (folder / p).exists()])
            elif verb == "resolve" and (folder / path).is_file():
                self.file((folder / path).read_bytes())
            else:
                self.send(404, b"{}", X_Error_Code="EntryNotFound")

        do_HEAD = do_POST = do_GET

        def json(self, value):
            self.send(200, json.dumps(value).encode(), Content_Type="application/json")

        def file(self, data):
            headers = {
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                "X_Repo_Commit": COMMIT,
                "Accept_Ranges": "bytes",
            }
            if asked := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(asked[1]), int(asked[2] or len(data) - 1)
                headers["Content_Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
                self.send(206, data[first : last + 1], **headers)
            else:
                self.send(200, data, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
