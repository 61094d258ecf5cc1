"""A fake of Google Cloud Storage with one bucket, which answers the calls of pyarrow and Google's client."""

import contextlib
import json
import re
import threading
import time
from email import message_from_bytes
from urllib.parse import parse_qs, unquote, urlsplit

from servers import Handler, listening


class Bucket(Handler):
    """Handles requests of the JSON API. `server.objects` is {name: (content, generation, time, metadata)}."""

    protocol_version = "HTTP/1.1"

    def facts(self, name):
        content, generation, seconds, metadata = self.server.objects[name]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
        return {
            "kind": "storage#object", "name": name, "bucket": "bucket", "size": str(len(content)), "generation": str(generation),
            "metageneration": "1", "updated": stamp, "timeCreated": stamp, "storageClass": "STANDARD", "id": f"bucket/{name}",
            "metadata": metadata,
        }  # fmt: skip

    def answer(self, value, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send(status, body, "application/json", **headers)

    def missing(self, status=404, reason="notFound"):
        self.answer({"error": {"code": status, "message": reason, "errors": [{"reason": reason}]}}, status)

    def store(self, name, content, query, metadata=None):
        # the lock lets no other request write between the check of the condition and the write
        with self.server.lock:
            current = self.server.objects.get(name, (b"", 0))[1]
            if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != current:
                self.missing(412, "conditionNotMet")
                return
            self.server.generation += 1
            now = time.time()
            self.server.objects[name] = (content, self.server.generation, now, metadata or {})
        self.answer(self.facts(name))

    def parts(self):
        url = urlsplit(self.path)
        name = re.search(r"/b/bucket/o/?(.*)$", url.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        return unquote(name[1]) if name else None, query

    def do_POST(self):
        _, query = self.parts()
        body = self.body()
        if query.get("uploadType") == "multipart":
            kind = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            info, content = message_from_bytes(kind + body).get_payload()
            info = json.loads(info.get_payload())
            name = query.get("name") or info["name"]
            self.store(name, content.get_payload(decode=True), query, info.get("metadata"))
        elif query.get("uploadType") == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            location = f"{self.server.address}/upload/storage/v1/b/bucket/o?name={name}&upload_id=1"
            self.server.uploads[name] = b""
            self.answer({}, Location=location)
        else:
            self.store(query["name"], body, query)

    def do_PUT(self):
        _, query = self.parts()
        self.server.uploads[query["name"]] += self.body()
        total = self.headers.get("Content-Range", "").rpartition("/")[2]
        if total == "*":
            end = len(self.server.uploads[query["name"]]) - 1
            self.send(308, b"", Range=f"bytes=0-{end}")
        else:
            self.store(query["name"], self.server.uploads.pop(query["name"]), query)

    def do_GET(self):
        name, query = self.parts()
        if not name:
            if name is None:  # request for the metadata of the bucket
                self.answer({"kind": "storage#bucket", "name": "bucket", "location": "US"})
                return
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
            keys = sorted(key for key in self.server.objects if key.startswith(prefix))
            nested = {key for key in keys if delimiter and delimiter in key[len(prefix) :]}
            prefixes = {prefix + key[len(prefix) :].split("/")[0] + "/" for key in nested}
            markers = nested - {
                key for key in nested if key[len(prefix) :].count("/") == 1 and key.endswith("/")
            }
            items = [self.facts(key) for key in keys if key not in markers]  # includeTrailingDelimiter
            self.answer({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})
        elif name not in self.server.objects:
            self.missing()
        elif query.get("alt") == "media" or "/download/" in self.path:
            content, generation, *_ = self.server.objects[name]
            self.answer(content, x_goog_generation=str(generation))
        else:
            self.answer(self.facts(name))

    def do_DELETE(self):
        name, _ = self.parts()
        if self.server.objects.pop(name, None):
            self.send(204, b"")
        else:
            self.missing()


@contextlib.contextmanager
def gcs(monkeypatch):
    """Starts a server with the bucket gs://anonymous@bucket, and makes pyarrow and Google's client use it."""
    facts = {"objects": {}, "uploads": {}, "generation": 0, "lock": threading.Lock()}
    with listening(Bucket, **facts) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", server.address)
        yield server
