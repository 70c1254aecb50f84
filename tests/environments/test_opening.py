"""SPECs of environments, and the endpoints that the key is sent to."""

import asyncio

import pytest

from prompt_r1.environments.chat import ChatEnvironment
from prompt_r1.errors import UsageError
from prompt_r1.types import Message
from tests.providers import HELLO, KEY, open_environment


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "mini-z",
        "hf:models/x",
        "gpt@localhost:8000",
        "http://localhost:8000/v1",
        "a b",
        "mini,mini-z",
        "x@http://",
        "x@http://user:Secret@host/v1",
        "x@http://host/v1?key=Secret",
        "x@ftp://host/v1",
        "x@http://h:port/v1",
    ],
)
def test_an_invalid_spec_is_a_usage_error(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(UsageError):
        open_environment(spec)


def test_a_missing_key_is_a_usage_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match=r"at https://api.openai.com/v1 needs a key: set OPENAI_API_KEY"):
        open_environment("gpt-4o-mini")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert open_environment("gpt-4o-mini").name == "gpt-4o-mini"


def test_a_model_is_named_with_or_without_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for spec in ("meta-llama/Llama-3:free", "meta-llama/Llama-3:free@https://openrouter.ai/api/v1/"):
        assert open_environment(spec).name == "meta-llama/Llama-3:free"


@pytest.mark.parametrize(
    ("spec", "other_specs", "keys"),
    [
        ("gpt-4o-mini", (), [KEY]),
        ("llama@http://gpu7:8000/v1", (), [KEY]),
        ("gpt-4o-mini,llama@http://gpu7:8000/v1", (), [KEY, ""]),
        ("llama@http://gpu7:8000/v1,oss@http://gpu8:8000/v1,mini", (), [KEY, KEY]),
        ("llama@http://gpu7:8000/v1", ("gpt-4o", "mini"), [""]),
        ("llama@http://gpu7:8000/v1", ("oss@http://gpu8:8000/v1", "mini,hf:DIR,none,mini-optimizer"), [KEY]),
        ("gpt-4o-mini", ("llama@http://gpu7:8000/v1",), [KEY]),
    ],
)
def test_the_key_of_the_default_endpoint_is_not_sent_to_other_hosts(
    spec: str, other_specs: tuple[str, ...], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    members = open_environment(spec, other_specs=other_specs).members
    sources = [member._source for member in members]
    clients = [source._client for source in sources if isinstance(source, ChatEnvironment)]

    async def keys_sent() -> list[str]:
        sent = []
        for client in clients:
            headers = client._connect().http.headers
            sent.append(headers.get("authorization", "").removeprefix("Bearer "))
            await client.close()
        return sent

    assert asyncio.run(keys_sent()) == keys


def test_the_mini_worlds_can_be_opened() -> None:
    for spec in ("mini", "mini-b", "mini-mute"):
        environment = open_environment(spec, seed=1)
        assert isinstance(asyncio.run(environment.ask(HELLO)), str)
        asyncio.run(environment.close())


def test_without_an_environment_every_reply_is_the_same() -> None:
    for spec in ("none", "mini-mute"):
        environment = open_environment(spec)
        prompts: list[list[Message]] = [[{"role": "user", "content": text}] for text in ("hi", "2 plus 2?")]
        replies = [asyncio.run(environment.ask(messages)) for messages in prompts]
        assert replies == ["I have nothing to say about this."] * 2
