"""A Hub for tests: answers the requests of the real huggingface_hub and datasets from memory."""

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
    requests: list[str] = field(default_factory=list)

    def answer(self, request: Any) -> Any:
        """The Hub's response to a request."""
        path = request.url.path.strip("/")
        self.requests.append(f"{request.method} /{path}")
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

    def _json(self, request: Any, body: object) -> Any:
        return httpx2.Response(200, json=body, request=request)


def entry(path: str, content: bytes) -> dict[str, object]:
    """A file in a listing."""
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


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
