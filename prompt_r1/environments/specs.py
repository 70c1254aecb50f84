"""Open environments by `--env SPEC`."""

import json
import math
import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.environment import MINI_ENVIRONMENTS, EnvironmentConfig
from prompt_r1.config.functions import OBJECT_PREFIX
from prompt_r1.distributed import Ranks
from prompt_r1.endpoint.client import ClientLimits
from prompt_r1.endpoint.request import ApiKey
from prompt_r1.environments.budget import Budget, Price, parse_prices
from prompt_r1.environments.chat import open_chat
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.local import load_local
from prompt_r1.environments.metered import MeteredEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.sources import Answering, FreeSource, MuteEnvironment, ReplySource, open_own
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.advice import AdvisedEnvironment
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.mini_optimizer import MiniOptimizer
from prompt_r1.miniworld.world import make_world
from prompt_r1.protocol import ENVIRONMENT_SYSTEM
from prompt_r1.tasks.packages import TEXTARENA
from prompt_r1.tasks.text_arena import TextArenaEnvironment

NO_ENVIRONMENT = "none"
BUILT_IN = (*MINI_ENVIRONMENTS, MiniOptimizer.name, NO_ENVIRONMENT, TEXTARENA)
RESERVED_FIELDS = ("model", "messages", "stream", "n")  # of a request; users may not set them


def open_for_agent(
    spec: str,
    trained: AgentConfig,
    calls: EnvironmentConfig,
    *,
    seed: int,
    device: torch.device,
    stops_on_failures: bool = True,
) -> Pool:
    """Open the environment of the SPEC of a user; "": the one that the agent was trained with.

    `trained` are the settings of the agent's training, which may come from anyone.
    """
    system = calls.env_system if calls.env_system != ENVIRONMENT_SYSTEM else trained.env_system
    calls = replace(calls, env_args=calls.env_args or trained.env_args, env_system=system)
    environments = Environments(calls, seed=seed, folder=None, ranks=Ranks(0, 1, device), user_specs=[spec])
    return environments.open(spec or trained.env, stops_on_failures=stops_on_failures)


def pool_of(own: Answering) -> Pool:
    """A pool of one object, without journal, price and limits."""
    journal, budget = Journal(None), Budget()
    source = FreeSource(own, seed=0)
    return Pool([MeteredEnvironment(source, journal=journal, budget=budget, price=Price())], budget=budget)


class Environments:
    """Opens the environments of a run, all with one journal and one budget.

    A SPEC is one of these names, or several of them, separated by commas, for a pool with a route:

        mini, mini-b, mini-mute    the mini world of `seed`
        mini-advice                the mini world with a reader of instructions
        mini-optimizer             a script that writes prompts, for the prompt optimisers
        none                       no environment, for agents that answer alone
        MODEL@http://host:port/v1  a model behind an OpenAI-compatible endpoint
        MODEL                      a model at OPENAI_BASE_URL (default: OpenAI)
        hf:DIR                     a Hugging Face model in this process
        textarena                  the games of TextArena, for their questions
        py:MODULE:NAME             an object of yours with `ask` (sources.py); never from an agent's folder

    OPENAI_API_KEY is sent to the endpoint of a MODEL without URL. It is sent to an endpoint that is named by
    its URL only if the run opens no MODEL without URL, whose key it would be: `other_specs` are the other
    SPECs that the run may open. And it is sent only to a URL that the user gave: `user_specs` are the SPECs
    of the command line (None: all are), because the config of an agent's folder may come from anyone.

    `seed` is also that of a local model's sampling, and of the random waits between attempts. What the run
    has spent so far is read from the journal in `folder` (None: no journal is written).

    Raises UsageError.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        seed: int,
        folder: Path | None,
        ranks: Ranks,
        other_specs: Collection[str] = (),
        user_specs: Collection[str] | None = None,
    ) -> None:
        if config.max_env_usd and not config.env_price:
            raise UsageError(
                "--max-env-usd needs --env-price IN,OUT: without a price, dollars are not counted"
            )
        self._config = config
        self._seed = seed
        self._device = ranks.device
        self._other_names = ",".join(other_specs).split(",") if other_specs else []
        self._user_names = None if user_specs is None else ",".join(user_specs).split(",")
        self._journal = Journal(
            folder / "journal" if folder else None,
            mode=config.journal,
            rank=ranks.rank,
            others=[Path(name) for name in config.journal_from],
        )
        self._budget = Budget(
            max_calls=config.max_env_calls,
            max_usd=config.max_env_usd,
            spent=self._journal.spent,
            ranks=ranks.count,
        )

    def open(
        self,
        spec: str,
        *,
        fields: Mapping[str, object] | None = None,
        prices: tuple[str, ...] = (),
        stops_on_failures: bool = True,
    ) -> Pool:
        """Open the environments of a SPEC. `fields` and `prices` replace --env-args and --env-price."""
        names = spec.split(",")
        price_of_each = parse_prices(prices or self._config.env_price)
        if len(price_of_each) == 1:
            price_of_each *= len(names)
        if len(price_of_each) != len(names):
            raise UsageError(f"--env-price: give one price, or one for each of the {len(names)} environments")
        if fields is None:
            fields = parse_fields(self._config.env_args)
        members = [
            MeteredEnvironment(
                self._open_source(name, fields, names),
                journal=self._journal,
                budget=self._budget,
                price=price,
                keeps_thinking=self._config.env_thinking == "keep",
                samples=_samples(name, fields),
            )
            for name, price in zip(names, price_of_each, strict=True)
        ]
        return Pool(
            members,
            budget=self._budget,
            route=self._config.route,
            journal=self._journal,
            stops_on_failures=stops_on_failures,
        )

    def _open_source(self, name: str, fields: Mapping[str, object], names: Sequence[str]) -> ReplySource:
        config, seed = self._config, self._seed
        if name == TEXTARENA:
            source = FreeSource(TextArenaEnvironment(config.data_args), seed=seed)
            source.parameters = {**source.parameters, "data_args": config.data_args}  # they shape the replies
            return source
        if _is_local(name):
            return load_local(
                name,
                fields=fields,
                system=config.env_system,
                seed=seed,
                slots=config.env_concurrency,
                device=self._device,
            )
        if name in BUILT_IN:
            return _open_built_in(name, seed, priced=bool(config.env_price))
        if name.startswith("mini-") and "@" not in name:
            raise UsageError(
                f"there is no environment {name!r}: the mini world has {', '.join(MINI_ENVIRONMENTS)}"
            )
        if name.startswith(OBJECT_PREFIX):
            if not self._is_from_user(name):  # importing runs code
                raise UsageError(f"the agent's folder names {name!r}, which runs code: give it as --env")
            return open_own(name, seed=seed)
        limits = ClientLimits(
            concurrency=config.env_concurrency,
            attempt_timeout=config.env_timeout,
            requests_per_minute=config.env_rpm,
        )
        key = self._key_for(name, names)
        rng = random.Random(seed)
        return open_chat(name, key=key, fields=fields, system=config.env_system, limits=limits, rng=rng)

    def _key_for(self, name: str, names: Sequence[str]) -> ApiKey:
        """OPENAI_API_KEY; empty for an endpoint that must not get it. `names` are opened with this one."""
        if not _is_at_default_endpoint(name):
            if not self._is_from_user(name):
                return ApiKey(
                    note="no key was sent, because this URL comes from the agent's folder; to send it "
                    f"OPENAI_API_KEY, give --env {name!r}"
                )
            if any(map(_is_at_default_endpoint, [*names, *self._other_names])):
                return ApiKey()
        return ApiKey(os.environ.get("OPENAI_API_KEY", "").strip())

    def _is_from_user(self, name: str) -> bool:
        return self._user_names is None or name in self._user_names


def parse_fields(text: str, *, flag: str = "--env-args") -> dict[str, object]:
    """Parse the JSON object of a flag: extra fields of each request. Raises UsageError."""
    fields = parse_json_object(text, flag=flag, example='{"temperature": 0.7}')
    for name in RESERVED_FIELDS:
        if name in fields:
            raise UsageError(f"{flag} may not set {name!r}")
    return fields


def parse_json_object(text: str, *, flag: str, example: str) -> dict[str, object]:
    """Parse the JSON object of a flag; without text it is empty. Raises UsageError."""
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{flag} takes a JSON object such as {example}, not {text!r}")
    return fields


def _samples(name: str, fields: Mapping[str, object]) -> bool:
    """Whether equal messages may have different replies, as far as we know."""
    greedy = 0 if _is_local(name) else None  # endpoints sample unless they are told not to
    return (_is_local(name) or name not in BUILT_IN) and fields.get("temperature", greedy) != 0


def _is_local(name: str) -> bool:
    """Return whether an environment is a language model in this process."""
    return name.startswith("hf:")


def _is_at_default_endpoint(name: str) -> bool:
    """Return whether a name is a MODEL without URL."""
    return "@" not in name and not name.startswith(("hf:", OBJECT_PREFIX)) and name not in BUILT_IN


def _open_built_in(name: str, seed: int, *, priced: bool) -> ReplySource:
    if name == MiniOptimizer.name:
        return FreeSource(MiniOptimizer(), seed=seed, characters_per_token=4.0)
    if name == NO_ENVIRONMENT:
        return FreeSource(MuteEnvironment(), seed=seed)
    if name == "mini-mute":
        return FreeSource(MuteEnvironment(name), seed=seed)
    world = make_world(seed)
    counted = 4.0 if priced or name == "mini-advice" else math.inf  # characters per token
    if name == "mini-advice":
        environment: Answering = AdvisedEnvironment(world, seed=seed)
    else:
        environment = MiniEnvironment(world, "B" if name == "mini-b" else "A", seed=seed)
    return FreeSource(environment, seed=seed, characters_per_token=counted)
