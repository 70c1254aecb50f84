"""Agents by hub id: a hub out of reach is noticed at the first attempt, and nothing else changes."""

import pytest
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from prompt_r1.agent.hub import _reachable, loading_options

httpx2 = pytest.importorskip("httpx2", reason="the hub's client")


@pytest.fixture
def hub():
    """A hub that answers as the test says; `requests` are those that reached it."""
    requests: list[str] = []

    def answer_with(answer) -> list[str]:
        def handle(request):
            requests.append(request.url.path)
            return answer(request)

        set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(handle)))
        return requests

    _reachable.cache_clear()
    yield answer_with
    set_client_factory(default_client_factory)
    _reachable.cache_clear()


def no_network(request):
    raise httpx2.ConnectError("Name or service not known", request=request)


def test_without_a_network_one_attempt_is_made_and_the_cache_is_used(hub):
    """transformers alone tried each file six times: a mistyped name took a minute to fail."""
    requests = hub(no_network)
    assert loading_options("Qwen/Qwen3-4B") == loading_options("Qwen/Qwen3-4B") == {"local_files_only": True}
    assert requests == ["/api/models/Qwen/Qwen3-4B"]


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_a_hub_that_answers_at_all_is_left_to_transformers(hub, status):
    hub(lambda request: httpx2.Response(status, request=request))
    assert loading_options("no-one/nothing") == {}


def test_a_model_that_exists_is_downloaded_as_ever(hub):
    hub(lambda request: httpx2.Response(200, json={"id": "a/b"}, request=request))
    assert loading_options("a/b") == {}


def test_a_folder_needs_no_hub(hub, tmp_path):
    requests = hub(no_network)
    assert loading_options(tmp_path) == {} and not requests
