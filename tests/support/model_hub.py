"""A fake Hugging Face Hub. Tests push models to the fake Hub, and load models and datasets from it."""

import base64
import hashlib
import json
import os
import re
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlparse

import pytest
import servers

TOKEN = "hf_" + "aB3" * 11  # token of a user who may write
REPO = r"((?:datasets/)?[\w.-]+/[\w.-]+)"
READER = "hf_" + "rO7" * 11  # token of a user who may only read


class ModelHub:
    """Stores the repositories of the fake Hub. The names of dataset repositories start with `datasets/`."""

    def __init__(self):
        self.repos = {}  # {name: {"private": bool, "gated": bool, "branches": {name: commit}, "commits": {commit: files}}}
        self.blobs = {}  # LFS files, by sha256
        self.requests = []  # (method, path, authorization) of each request
        self.lfs = False  # whether safetensors files are stored as LFS files
        self.broken_after = None  # number of write requests after which the fake Hub fails
        self.address = ""

    def put(self, repo, files, private=False, gated=False, branch="main"):
        """Commits the files {path: bytes} to a branch. Returns the id of the commit."""
        empty = {"private": private, "gated": gated, "branches": {}, "commits": {}}
        entry = self.repos.setdefault(repo, empty)
        content = repr((entry["branches"].get(branch), sorted(files.items())))
        commit = hashlib.sha1(content.encode()).hexdigest()
        entry["branches"][branch], entry["commits"][commit] = commit, dict(files)
        return commit

    def files(self, repo, branch="main"):
        return self.repos[repo]["commits"][self.repos[repo]["branches"][branch]]

    def writes(self):
        return [(method, path) for method, path, _ in self.requests if method not in ("GET", "HEAD")]


def of_folder(folder):
    """Returns {path: bytes} for the files of a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


class Handler(servers.Handler):
    protocol_version = "HTTP/1.1"
    hub: ModelHub

    def send(self, status, body=b"", kind="application/json", **headers):
        super().send(status, body if isinstance(body, bytes) else json.dumps(body).encode(), kind, **headers)

    def refuse(self, status, code):
        self.send(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def answer(self):
        hub, path = self.hub, unquote(urlparse(self.path).path)
        body = self.body()
        authorization = self.headers.get("Authorization")
        hub.requests.append((self.command, path, authorization))
        if self.command in ("POST", "PUT") and hub.broken_after is not None:
            hub.broken_after -= 1
            if hub.broken_after < 0:
                self.send(507, {"error": "no space left"})  # clients do not retry a request after status 507
                return
        users = {f"Bearer {TOKEN}": "owner", f"Bearer {READER}": "reader"}
        user = users.get(authorization)
        if authorization and user is None and not path.startswith("/lfs/"):
            self.send(401, {"error": "Invalid credentials"})
        elif path == "/":
            self.send(200)
        elif path == "/api/whoami-v2":
            self.send(200 if user else 401, {"name": user, "type": "user", "orgs": [], "auth": {}})
        elif path == "/api/validate-yaml":
            self.send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(body), user)
        elif path.startswith("/lfs/"):
            hub.blobs[path.removeprefix("/lfs/")] = body
            self.send(200)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.lfs_batch(json.loads(body))
        elif match := re.fullmatch(rf"/api/(?:models/)?{REPO}(?:/(\w[\w-]*)(?:/(.*))?)?", path):
            self.repository(match[1], match[2], match[3], body, user)
        elif match := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
            self.file(match[1], match[2], match[3], user)
        else:
            self.send(404, {"error": path})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return super().body()
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def create(self, request, user):
        name = f"{request.get('organization') or user}/{request['name']}"
        if user != "owner" or name.startswith("others/"):
            self.send(403, {"error": "You don't have the rights to create a model under this namespace"})
        else:
            exists, files = name in self.hub.repos, {".gitattributes": b"*.safetensors lfs\n"}
            if not exists:
                self.hub.put(name, files, private=request.get("visibility") == "private")
            self.send(409 if exists else 200, {"error": "", "url": f"{self.hub.address}/{name}"})

    def found(self, repo, revision, user):
        """Returns (repository, commit), or sends an error and returns None."""
        entry = self.hub.repos.get(repo)
        if entry is None or (entry["private"] and user is None):
            self.refuse(404 if user else 401, "RepoNotFound")
            return None
        if entry["gated"] and user != "owner":
            self.refuse(403 if user else 401, "GatedRepo")
            return None
        commit = entry["branches"].get(revision, revision)
        if commit not in entry["commits"]:
            self.refuse(404, "RevisionNotFound")
            return None
        return entry, commit

    def repository(self, repo, verb, rest, body, user):
        revision = (rest or "main").split("/")[0]
        result = self.found(repo, revision, user)
        if result is None:
            return
        entry, commit = result
        files = entry["commits"][commit]
        if verb in (None, "revision"):
            facts = {
                "id": repo.removeprefix("datasets/"), "sha": commit, "siblings": [{"rfilename": name} for name in files],
                "private": entry["private"], "tags": [], "downloads": 0,
            }  # fmt: skip
            self.send(200, facts)
        elif verb == "tree":
            entries = self.tree(files, (rest or "").partition("/")[2], "recursive=true" in self.path.lower())
            self.send(200, entries) if entries else self.refuse(404, "EntryNotFound")
        elif verb == "paths-info":
            paths = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            folders = {os.path.dirname(path) for path in paths}
            self.send(200, [e for path in folders for e in self.tree(files, path) if e["path"] in paths])
        elif verb == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            facts = [{"uploadMode": self.mode(path), "oid": self.oid(files, path)} for path in paths]
            modes = zip(paths, facts, strict=True)
            self.send(200, {"files": [{"path": path, "shouldIgnore": False, **fact} for path, fact in modes]})
        elif verb == "commit":
            self.commit(repo, entry, revision, files, body, user)
        else:
            self.send(404, {"error": verb})

    def mode(self, path):
        return "lfs" if self.hub.lfs and path.endswith(".safetensors") else "regular"

    def oid(self, files, path):
        if path not in files:
            return None
        data = files[path]
        if self.mode(path) == "lfs":
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def tree(self, files, inside="", recursive=False):
        """Lists the files and folders in a folder. If `recursive` is set, also lists the contents of its subfolders."""
        entries = {}
        for name, data in files.items():
            if not inside or name.startswith(f"{inside}/"):
                parts = name.removeprefix(inside).lstrip("/").partition("/")
                folder = f"{inside}/{parts[0]}".lstrip("/")
                if parts[1]:
                    entries[folder] = {"type": "directory", "oid": "0", "size": 0, "path": folder}
                if recursive or not parts[1]:
                    oid = hashlib.sha1(data).hexdigest()
                    entries[name] = {"type": "file", "oid": oid, "size": len(data), "path": name}
        return list(entries.values())

    def commit(self, repo, entry, branch, files, body, user):
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        if user != "owner":
            self.send(403, {"error": "forbidden"})
            return
        contents = dict(files)
        for operation in lines:
            value = operation["value"]
            if operation["key"] == "file":
                contents[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                contents[value["path"]] = self.hub.blobs[value["oid"]]
            elif operation["key"] == "deletedFile":
                contents.pop(value["path"])
        oid = self.hub.put(repo, contents, branch=branch)
        url = f"{self.hub.address}/{repo}/commit/{oid}"
        self.send(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def lfs_batch(self, request):
        for item in request["objects"]:
            item["actions"] = {"upload": {"href": f"{self.hub.address}/lfs/{item['oid']}"}}
        self.send(200, {"transfer": "basic", "objects": request["objects"]})

    def file(self, repo, revision, path, user):
        result = self.found(repo, revision, user)
        if result is None:
            return
        entry, commit = result
        data = entry["commits"][commit].get(path)
        if data is None:
            self.send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        headers = {"ETag": etag, "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), int(match[2] or len(data) - 1)
            headers["Content_Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
            self.send(206, data[first : last + 1], **headers)
        else:
            self.send(200, data, **headers)


@contextmanager
def serve():
    """Runs a server with an empty ModelHub. Yields the ModelHub."""
    hub = ModelHub()
    with servers.listening(type("Handler", (Handler,), {"hub": hub})) as server:
        hub.address = server.address
        yield hub


@contextmanager
def connected(cache):
    """Makes the libraries in this process use a ModelHub instead of the real Hub, and an empty cache.

    For a new process, the variables HF_ENDPOINT and HF_HOME suffice. This process has imported huggingface_hub already.
    """
    import huggingface_hub.hf_api
    from huggingface_hub import constants

    from pipeline.system.hub import _hub_answers

    with serve() as hub, pytest.MonkeyPatch.context() as patch:
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.address)
        patch.setattr("transformers.utils.hub._hf_api", None)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.delenv("HF_TOKEN", raising=False)
        _hub_answers.cache_clear()
        yield hub
    _hub_answers.cache_clear()
