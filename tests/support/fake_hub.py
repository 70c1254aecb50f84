"""A Hub for tests: answers the requests of the real huggingface_hub and datasets from memory."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from prompt_r1.hub import hub_is_reachable

httpx2 = pytest.importorskip("httpx2", reason="huggingface_hub's HTTP client")
COMMIT = "0" * 40


@dataclass
class FakeHub:
    """Repositories by "datasets/ORG/NAME" or "models/ORG/NAME", with the contents of their files by path."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: list[str] = field(default_factory=list)  # repositories that were made private
    requests: list[str] = field(default_factory=list)
    token: str = ""  # that writing needs

    def answer(self, request: Any) -> Any:
        """The Hub's response to a request."""
        path = request.url.path.strip("/")
        self.requests.append(f"{request.method} /{path}")
        if request.method == "POST" and not path.endswith("paths-info/" + COMMIT):
            if request.headers.get("authorization") != f"Bearer {self.token}":
                return self._json(request, {"error": "Invalid credentials"}, status=401)
            return self._json(request, self._write(path, json_lines(request)))
        kind, *parts = path.removeprefix("api/").split("/")
        if kind not in ("datasets", "models"):
            kind, parts = "models", [kind, *parts]
        name = "/".join([kind, *parts[:2]])
        if name not in self.files:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return httpx2.Response(404, headers=headers, request=request)
        files, rest = self.files[name], parts[2:]
        if rest[:1] == ["resolve"]:
            return self._file(request, files.get("/".join(rest[2:])))
        if rest[:1] == ["tree"]:
            return self._json(request, [entry(*one) for one in files.items()])
        if rest[:1] == ["paths-info"]:
            wanted = json.loads(request.content)["paths"]
            return self._json(request, [entry(path, files[path]) for path in wanted if path in files])
        siblings = [{"rfilename": path} for path in files]
        return self._json(request, {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings})

    def _write(self, path: str, lines: list[dict[str, Any]]) -> dict[str, object]:
        """Make a repository, say how to send files, or take a commit."""
        if path == "api/repos/create":
            name = f"{lines[0]['organization']}/{lines[0]['name']}"
            self.files.setdefault(f"models/{name}", {})
            if lines[0].get("private") or lines[0].get("visibility") == "private":
                self.private.append(name)
            return {"url": f"https://huggingface.co/{name}", "name": name}
        if path == "api/validate-yaml":  # of the model card
            return {"errors": [], "warnings": []}
        _, kind, organisation, name, action, *_ = path.split("/")
        if action == "preupload":
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{**one, **mode} for one in lines[0]["files"]]}
        assert action == "commit", path
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.files[f"{kind}/{organisation}/{name}"][line["value"]["path"]] = content
        return {
            "commitUrl": f"https://huggingface.co/{organisation}/{name}/commit/{COMMIT}",
            "commitOid": COMMIT,
        }

    def _file(self, request: Any, content: bytes | None) -> Any:
        if content is None:
            return httpx2.Response(404, headers={"X-Error-Code": "EntryNotFound"}, request=request)
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(content)),
        }
        body = b"" if request.method == "HEAD" else content
        return httpx2.Response(200, headers=headers, content=body, request=request)

    def _json(self, request: Any, body: object, *, status: int = 200) -> Any:
        return httpx2.Response(status, json=body, request=request)


def entry(path: str, content: bytes) -> dict[str, object]:
    """A file in a listing."""
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def json_lines(request: Any) -> list[dict[str, Any]]:
    """The JSON objects of a request's body."""
    return [json.loads(line) for line in request.read().splitlines() if line.strip()]


@contextmanager
def answered_by(answer: Any) -> Iterator[None]:
    """Let a function answer the requests of huggingface_hub inside."""
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(answer)))
    hub_is_reachable.cache_clear()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        set_client_factory(default_client_factory)
        hub_is_reachable.cache_clear()
