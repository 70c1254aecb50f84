"""What an evaluation compares, and what each method of it is made from."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from prompt_r1.data.questions import find_questions, sample_questions
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import Account, open_environment, parse_fields
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.games import mute_environment
from prompt_r1.evaluation.methods import METHODS, Setup
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.searches import Data, Fields
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.agent import Sampling
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.settings.agent import all_mini_data
from prompt_r1.types import Question

OPTIMIZER_REPLY = 2000  # tokens of what an optimiser writes, if nothing else limits it

Repeat = tuple[Question, int]
"""A question, and the number of its repeat (--repeats)."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation compares."""

    config: EvaluateConfig
    device: torch.device
    seed: int
    questions: Sequence[Question]
    agents: Mapping[str, NamedAgent]  # the agents of --agent, by their names
    systems: Mapping[System, NamedAgent]  # each system, and the agent that the user gave for it
    environments: Mapping[str, EvaluateConfig]  # each SPEC, and the settings by which it is asked
    prices: Mapping[str, Price]  # the price of each environment, by its name

    @property
    def folder(self) -> Path:
        """Where the answers and the tables are."""
        return Path(self.config.out)

    @property
    def repeats(self) -> list[Repeat]:
        """What each system answers: every question, --repeats times."""
        return [(question, sample) for question in self.questions for sample in range(self.config.repeats)]

    def data_for(self, systems: Iterable[System]) -> Data:
        """The questions that prepare the methods of these systems, or none if no method needs them.

        The mini world has its own.
        """
        if not any(METHODS[system.method].needs.training for system in systems):
            return Data([], [])
        own = ("mini",) if all_mini_data(self.config.data) else ()
        train = find_questions(self.config.train_data or own, "train", self.seed)
        validation = sample_questions(self.config.val_data or own, "validation", self.seed, 0)
        return Data(train, validation)

    def setup(self, system: System, data: Data, account: Account, opened: AsyncExitStack) -> Setup:
        """What a system's method is made from. For `account` and `opened`, see `open`."""
        config = self.config
        method = METHODS[system.method]
        agent = self.systems[system]
        spec = system.environment or agent.config.env
        if method.needs.environment:
            settings = self.environments[spec]
            fields = {**parse_fields(settings.env_args), **method.fields}
            environment = self.open(spec, settings, fields, self.prices, account, opened)
        else:
            environment = mute_environment()

        def open_optimizer(fields: Fields) -> Environment:
            writer = config.optimizer_env or spec
            settings = config if config.optimizer_env else self.environments[spec]
            if config.max_env_usd and limit_in(fields) is None:
                # The authors of GEPA set no limit, but a limit of dollars needs it.
                fields = {**fields, "max_tokens": OPTIMIZER_REPLY}
            return self.open(writer, settings, fields, self.prices_of_writer(spec), account, opened)

        return Setup(
            method=system.method,
            spec=spec,
            environment=environment,
            open_optimizer=open_optimizer,
            agent=agent,
            datasets=list(dict.fromkeys(question.dataset for question in self.questions)),
            data=data,
            calls=config.optimize_calls,
            examples=config.optimize_examples,
            seed=self.seed,
            sampling=Sampling(f"evaluation/{self.seed}", config.temperature, config.top_p),
            device=self.device,
            results=self.folder,
        )

    def open(
        self,
        spec: str,
        settings: EvaluateConfig,
        fields: Fields,
        prices: Mapping[str, Price],
        account: Account,
        opened: AsyncExitStack,
    ) -> Environment:
        """Open an environment, which `opened` will close. Each request to it has `fields`.

        Its calls are in the journal and the budget of `account`.
        """
        environment = open_environment(
            spec,
            replace(settings, env_args=json.dumps(fields)),
            # Only specs that the user typed may get the key.
            typed=[*self.config.env, self.config.optimizer_env],
            others={self.config.optimizer_env, *(system.environment for system in self.systems)},
            account=account,
            seed=self.seed,
            device=self.device,
            prices=prices,
        )
        opened.push_async_callback(environment.close)
        return environment

    def prices_of_writer(self, spec: str) -> dict[str, Price]:
        """The price of each model that writes prompts, in a search that asks the environment of `spec`."""
        names = (self.config.optimizer_env or spec).split(",")
        if self.config.optimizer_price:
            return parse_prices([self.config.optimizer_price], names)
        return {name: self.prices[name] for name in names}


def prices_of(config: EvaluateConfig, environments: Iterable[str]) -> dict[str, Price]:
    """The price of each environment by its name, also of --optimizer-env. Raises UsageError."""
    names = [name for spec in environments for name in spec.split(",")]
    prices = parse_prices(config.env_price, names)
    writers = config.optimizer_env.split(",") if config.optimizer_env else []
    if set(writers) <= prices.keys():
        return prices
    if len(config.env_price) > 1 and not config.optimizer_price:
        raise UsageError("--optimizer-env: which of several --env-price is its own? Give --optimizer-price")
    return parse_prices(config.env_price[:1], writers) | prices
