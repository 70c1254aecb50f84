"""Environments by SPEC: the names, the settings that reach them, and the key."""

import asyncio
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from prompt_r1.environments.budget import FREE, Bill, Price
from prompt_r1.environments.endpoint import Endpoint, endpoint_of
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import Caller
from prompt_r1.environments.specs import check_environment, open_account, trusted_names
from prompt_r1.environments.specs import open_environment as open_checked_environment
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.pair.settings import PairConfig, choose_pair
from prompt_r1.settings.agent import ENVIRONMENT_SYSTEM, AgentConfig, EnvironmentConfig
from prompt_r1.settings.flags import given_values
from prompt_r1.spending import Spending
from prompt_r1.types import Message
from tests.support.at_once import at_once
from tests.support.providers import HELLO, KEY, open_environment, reply

CPU = torch.device("cpu")
open_checked = partial(open_checked_environment, seed=0, device=CPU)


class Constant:
    """A user's environment that replies the same to equal dialogues."""

    samples = False

    def ask(self, messages: list[Message]) -> str:
        messages.pop()["content"] = ""  # of a copy: the agent's dialogue stays as it is
        return "constant"


class Crowded:
    """A user's environment that counts how many calls run at the same time."""

    def __init__(self) -> None:
        self.running = 0

    async def ask(self, messages: list[Message]) -> str:
        self.running += 1
        await asyncio.sleep(0.001)
        running, self.running = self.running, self.running - 1
        return str(running)


class Fickle:
    """A user's environment that replies differently to each game."""

    samples = False

    def ask(self, messages: list[Message], caller: Caller) -> str:
        return f"to game {caller.sample} of {caller.question} in epoch {caller.epoch}"


INVALID = [
    *("", "mini,", "hf:models/x", "a b", "gpt@localhost:8000", "http://localhost:8000/v1"),
    *("m@localhost/v1", "m@api.together.xyz/v1", "m@10.0.0.7", "m@[::1]:8000/v1", "x@http://host:65536/v1"),
    *("m@http:/h/v1", "m@http://xn--a.test/v1"),
    *("x@http://", "x@http://user:Secret@host/v1", "x@http://host/v1?key=Secret", "x@http://h:port/v1"),
]


@pytest.mark.parametrize("spec", INVALID)
def test_an_invalid_spec_is_a_usage_error(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(UsageError):
        open_environment(spec)


@pytest.mark.parametrize(
    ("spec", "others", "keys"),
    [
        ("gpt-4o-mini", (), [KEY]),
        ("llama@http://gpu7:8000/v1", (), [KEY]),
        ("gpt-4o-mini,llama@http://gpu7:8000/v1", (), [KEY, ""]),
        ("llama@http://gpu7:8000/v1,oss@http://gpu8:8000/v1,mini", (), [KEY, KEY]),
        ("llama@http://gpu7:8000/v1", ("gpt-4o", "mini"), [""]),
        ("llama@http://gpu7:8000/v1", ("oss@http://gpu8:8000/v1", "mini,hf:DIR,none,mini-mute"), [KEY]),
        ("gpt-4o-mini", ("llama@http://gpu7:8000/v1",), [KEY]),
    ],
)
def test_the_key_of_the_default_endpoint_is_not_sent_to_other_hosts(
    spec: str, others: tuple[str, ...], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    clients = open_environment(spec, others=others).clients
    sources = [client.source for client in clients]
    assert [source.key for source in sources if isinstance(source, Endpoint)] == keys


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (["llama@http://gpu7:8000/v1"], [KEY, ""]),
        (["oss@http://gpu8:8000/v1,llama@http://gpu7:8000/v1"], [KEY, KEY]),
        (["another@http://gpu9:8000/v1"], ["", ""]),
        ([], ["", ""]),
    ],
)
def test_a_url_that_was_read_from_a_file_does_not_get_the_key(typed, keys, monkeypatch) -> None:
    """A bug: the URL of a YAML file from a stranger got it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    spec = "llama@http://gpu7:8000/v1,oss@http://gpu8:8000/v1"
    trusted = trusted_names(typed=typed, opened=[spec])
    clients = open_checked(check_environment(spec, EnvironmentConfig(), trusted=trusted)).clients
    assert [client.source.key for client in clients] == keys


def test_a_model_without_a_url_gets_the_key_also_if_a_file_names_it(monkeypatch) -> None:
    """Then no URL gets it, although the user typed one: it is the key of the model's provider."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model, url = "gpt-4o-mini", "llama@http://gpu7:8000/v1"
    trusted = trusted_names(typed=[url], opened=[model, url])
    checked = check_environment(f"{model},{url}", EnvironmentConfig(), trusted=trusted)
    clients = open_checked(checked).clients
    assert [client.source.key for client in clients] == [KEY, ""]


@pytest.mark.parametrize("key", ["sk-Secret\n0123", "sk-Secret 0123", "sk-Secrét"])
def test_a_key_that_cannot_be_a_header_is_rejected_without_showing_it(key, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        open_environment("gpt-4o-mini")
    assert "Secr" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "  "])
def test_a_missing_key_is_reported_before_anything_is_loaded(key, monkeypatch) -> None:
    """A bug: a key of blanks passed, and the first reply was HTTP 401."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UsageError, match=r"needs a key: .*OPENAI_API_KEY"):
        open_environment("gpt-4o-mini")


LARGE = "large@http://llm.test/v1"


def test_a_server_of_this_machine_that_does_not_listen_is_named_at_once() -> None:
    with pytest.raises(UsageError, match="tiny at http://localhost:9/v1: no server answers there"):
        open_environment("tiny@http://localhost:9/v1")


def opened_endpoint(spec: str, **settings: object) -> Endpoint:
    [client] = open_environment(spec, **settings).clients
    assert isinstance(client.source, Endpoint)
    return client.source


def test_the_settings_of_the_command_line_reach_the_source(asking_agent, monkeypatch) -> None:
    source = opened_endpoint(LARGE, env_args='{"temperature": 0.7}')
    assert source.timeout == 120.0
    assert source.parameters["temperature"] == 0.7 and "helpful assistant" in str(source.parameters["system"])
    monkeypatch.setattr("prompt_r1.environments.local.load_local", local := Mock(return_value=source))
    calls = EnvironmentConfig(env_system="Own.", env_concurrency=3)
    checked = check_environment(f"hf:{asking_agent}", calls)
    open_checked(checked, seed=7)
    assert {"system": "Own.", "slots": 3, "seed": 7}.items() <= local.call_args.kwargs.items()


def test_env_concurrency_limits_the_calls_that_run_at_the_same_time() -> None:
    asked = open_environment("py:tests.environments.test_specs:Crowded", env_concurrency=3)
    counts = at_once(reply(asked, sample=sample) for sample in range(9))
    assert max(counts) == "3"


@pytest.mark.parametrize(
    ("spec", "given", "sent"),
    [
        ("", {}, {"system": "As trained.", "top_p": 0.5}),
        ("", {"env_system": "Own.", "env_args": '{"seed": 1}'}, {"system": "Own.", "seed": 1}),
        (LARGE, {}, {"system": ENVIRONMENT_SYSTEM}),
        (LARGE, {"env_system": "Own."}, {"system": "Own."}),
    ],
)
def test_settings_of_the_training_are_sent_to_its_own_environment_only(spec, given, sent) -> None:
    """A bug: fields of the training were sent to an environment that the user named, which refused them."""
    trained = AgentConfig(env=LARGE, env_system="As trained.", env_args='{"top_p": 0.5}')
    chosen = choose_pair(PairConfig(env=spec, **given), given, NamedAgent("a", trained, "a"))
    [client] = open_checked(chosen.environment).clients
    shown = {name: client.source.parameters.get(name) for name in ("system", "top_p", "seed")}
    assert shown == {"top_p": None, "seed": None} | sent


@pytest.mark.parametrize(
    ("flag", "default"), [("--route", "session"), ("--env-system", ENVIRONMENT_SYSTEM), ("--env-args", "{}")]
)
def test_a_flag_with_its_default_value_replaces_a_setting_of_the_training(flag, default) -> None:
    """A bug: after a training with `--route uniform`, `--route session` was ignored."""
    trained = AgentConfig(env="mini", route="uniform", env_system="As trained.", env_args='{"top_p": 0.5}')
    given = given_values(PairConfig, [flag, default])
    chosen = choose_pair(PairConfig(**given), given, NamedAgent("a", trained, "a"))
    settings = chosen.environment.config
    names = ("route", "env_system", "env_args")
    expected = {
        name: default if "--" + name.replace("_", "-") == flag else getattr(trained, name) for name in names
    }
    assert {name: getattr(settings, name) for name in names} == expected


@pytest.mark.parametrize("env_args", ["{", "[" * 100_000])
def test_env_args_that_are_no_json_are_refused_in_one_sentence(env_args) -> None:
    """A bug: deep brackets, from the file of a stranger's agent, raised a RecursionError."""
    with pytest.raises(UsageError, match="--env-args is not JSON"):
        check_environment("mini", EnvironmentConfig(env_args=env_args))


def test_prices_of_one_environment_replace_those_of_the_run() -> None:
    checked = partial(check_environment, LARGE, EnvironmentConfig(env_price=("1,2",)))
    assert [source.price for source in checked().sources] == [Price(1, 2)]
    assert [source.price for source in checked(prices={LARGE: Price(3, 4)}).sources] == [Price(3, 4)]


def test_a_limit_of_dollars_may_have_a_free_environment_beside_one_with_a_price() -> None:
    """A bug: the paper's evaluation, with a model that is paid and one of the user's server, was refused."""
    config = EnvironmentConfig(max_env_usd=9.0)
    check_environment("mini", config, prices={"mini": FREE, "large": Price(1.0, 2.0)})
    with pytest.raises(UsageError, match="--max-env-usd needs --env-price"):
        check_environment("mini", config, prices={"mini": FREE})


def test_all_environments_of_a_run_share_one_journal_and_one_budget(tmp_path: Path) -> None:
    config = EnvironmentConfig(max_env_calls=2)
    account = open_account(config, tmp_path)

    def opened(name: str) -> Environment:
        return open_checked(check_environment(name, config), account=account)

    async def calls() -> None:
        first, second = opened("mini"), opened("mini-b")
        reply = await first.ask(HELLO)
        await second.ask(HELLO)
        assert await opened("mini").ask(HELLO) == reply  # from the journal
        with pytest.raises(Resumable, match="--max-env-calls 2 has no room"):
            await first.ask([*HELLO, *HELLO])

    asyncio.run(calls())
    assert (tmp_path / "journal/rank0.jsonl").read_text().count('"text"') == 2
    assert open_account(EnvironmentConfig(), tmp_path).budget.charged.calls == 2


@pytest.mark.parametrize(
    ("spec", "args", "samples"),
    [
        ("mini", "", False),
        ("gpt-4o-mini@http://llm.test/v1", "", True),
        ("gpt-4o-mini@http://llm.test/v1", '{"temperature": 0}', False),
        ("mini@http://llm.test/v1", '{"temperature": 0.7}', True),
        ("py:tests.support.echo_agent:Shouting", "", True),
        ("py:tests.environments.test_specs:Constant", "", False),
    ],
)
def test_an_environment_samples_unless_we_know_better(spec, args, samples):
    [client] = open_environment(spec, env_args=args).clients
    assert client.source.samples == samples


@pytest.mark.parametrize(("price", "tokens"), [((), (0, 0)), (("1,2",), (1, 2))])
def test_an_object_of_the_users_has_the_price_of_its_characters(price, tokens):
    environment = open_environment("py:tests.environments.test_specs:Constant", env_price=price)
    bill, dialogue = Bill(), [Message(role="user", content="Who?")]
    assert asyncio.run(environment.ask(dialogue, Caller(), bill)).text == "constant"
    assert dialogue == [{"role": "user", "content": "Who?"}]
    usd = (tokens[0] + 2 * tokens[1]) / 1e6
    assert bill.spent == environment.budget.charged == Spending(1, *tokens, usd=usd)


def test_an_object_of_the_users_that_takes_the_caller_replies_to_each_game(tmp_path):
    """A bug: with `samples = False`, all games of a group got the reply to the first."""
    config, spec = EnvironmentConfig(), "py:tests.environments.test_specs:Fickle"
    checked = check_environment(spec, config, trusted=[spec])
    asked = open_checked(checked, account=open_account(config, tmp_path))
    callers = [Caller("q"), Caller("q", sample=1), Caller("p"), Caller("q", epoch=1), Caller("q")]
    replies = [asyncio.run(asked.ask(HELLO, caller)).text for caller in callers]
    games = [f"to game {caller.sample} of {caller.question} in epoch {caller.epoch}" for caller in callers]
    assert replies == games


@pytest.mark.parametrize(
    ("spec", "model", "url"),
    [
        ("qwen3-4b@q4_k_m@http://localhost:1234/v1", "qwen3-4b@q4_k_m", "http://localhost:1234/v1"),
        ("@cf/meta/llama@http://localhost:1/v1/", "@cf/meta/llama", "http://localhost:1/v1"),
        ("qwen3-4b@q4_k_m", "qwen3-4b@q4_k_m", "http://127.0.0.1:7/v1"),
        ("@cf/meta/llama", "@cf/meta/llama", "http://127.0.0.1:7/v1"),
        ("google/gemini@001", "google/gemini@001", "http://127.0.0.1:7/v1"),
    ],
)
def test_a_models_name_may_hold_an_at_sign(spec, model, url, monkeypatch):
    """A bug: "there is no environment". A server of this machine at OPENAI_BASE_URL needs no key."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:7/v1")
    source = endpoint_of(spec, key="", fields={}, system="")
    assert (source.name, source.base_url) == (model, url)
