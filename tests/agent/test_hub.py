"""Loading agents by hub id: an unreachable hub is noticed at the first attempt."""

import pytest
import transformers.utils.hub
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from prompt_r1.agent.loading import load_policy, loading_options
from prompt_r1.errors import UsageError
from prompt_r1.hub import hub_is_reachable
from tests.support import tiny
from tests.support.games import CPU

httpx2 = pytest.importorskip("httpx2", reason="huggingface_hub's HTTP client")


@pytest.fixture
def hub():
    """A hub whose answers the test sets. The fixture returns the list of request paths."""
    requests: list[str] = []

    def answer_with(answer) -> list[str]:
        def handle(request):
            requests.append(request.url.path)
            return answer(request)

        set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(handle)))
        return requests

    hub_is_reachable.cache_clear()
    yield answer_with
    set_client_factory(default_client_factory)
    hub_is_reachable.cache_clear()


def no_network(request):
    raise httpx2.ConnectError("Name or service not known", request=request)


def test_an_unreachable_hub_is_tried_once_and_the_cache_is_used(hub):
    """Before, transformers tried each file six times: a mistyped name took a minute to fail."""
    requests = hub(no_network)
    assert loading_options("Qwen/Qwen3-4B") == loading_options("Qwen/Qwen3-4B") == {"local_files_only": True}
    assert requests == ["/api/models/Qwen/Qwen3-4B"]


@pytest.mark.parametrize("status", [200, 401, 404, 429, 503])
def test_a_model_that_exists_is_downloaded_and_errors_of_the_hub_are_left_to_transformers(hub, status):
    hub(lambda request: httpx2.Response(status, json={"id": "a/b"}, request=request))
    assert loading_options("a/b") == {}


def test_a_folder_is_loaded_without_the_hub(hub, tmp_path):
    requests = hub(no_network)
    assert loading_options(tmp_path) == {} and not requests


def test_the_index_of_a_model_of_the_hub_may_name_only_files_beside_it(hub, tmp_path, monkeypatch):
    """The index is in the hub's cache; without network nothing else is asked."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    tiny.save_agent(snapshot)
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub(no_network)
    assert load_policy("a/b", device=CPU).device == CPU
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../evil.safetensors"}}')
    with pytest.raises(UsageError, match="an index may name only"):
        load_policy("a/b", device=CPU)
