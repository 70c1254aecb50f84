"""What an evaluation compares, and the environments that it asks.

This file does not import torch, because an `Evaluation` is made before torch is imported (preflight.py).
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_r1.data.files import question_key
from prompt_r1.data.questions import find_questions
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import MuteEnvironment, OwnSource
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import (
    Account,
    check_environment,
    open_environment,
    parse_fields,
    trusted_names,
)
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.searches import Algorithm, Data, RequestFields, data_of_searches
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.settings.agent import is_mini_data
from prompt_r1.types import Question

if TYPE_CHECKING:
    import torch

OPTIMIZER_REPLY = 2000  # tokens of what an optimiser writes, if nothing else limits it

Repeat = tuple[Question, int]
"""A question, and the number of its repeat (--repeats)."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation compares. `read_evaluation` (preflight.py) makes it."""

    config: EvaluateConfig
    seed: int
    questions: Sequence[Question]
    data: Data  # the questions that prepare methods, empty if no method needs them
    agents: Mapping[str, NamedAgent]  # the agents of --agent and --grpo-agent, by their names
    # Each system, and its agent before any fine-tuning; None for a method without an agent.
    systems: Mapping[System, NamedAgent | None]
    environments: Mapping[str, EvaluateConfig]  # each SPEC, and the settings by which it is asked

    @property
    def folder(self) -> Path:
        """Where the answers and the tables are."""
        return Path(self.config.out)

    def folder_of(self, system: System) -> Path:
        """Where a method keeps the prompts that it finds, or the agent that it fine-tunes.

        It is OUT/ENVIRONMENT/METHOD/AGENT, without the names that the system lacks.
        """
        parts = [system.environment, system.method, system.agent]
        return self.folder.joinpath(*[file_name(part) for part in parts if part])

    @property
    def device(self) -> "torch.device":
        """The device of the models in this process."""
        from prompt_r1.model.machine import pick_device  # It imports torch.

        return pick_device(self.config.device)

    @cached_property
    def prices(self) -> dict[str, Price]:
        """The price of each environment and optimiser, by its name."""
        return prices_of(self.config, self.environments)

    @cached_property
    def searches(self) -> dict[str, Data]:
        """The names of the searches of a prompt optimiser, and the questions of each search."""
        datasets = list(dict.fromkeys(question.dataset for question in self.questions))
        return data_of_searches(datasets, self.data)

    @cached_property
    def repeats(self) -> list[Repeat]:
        """What each system answers: every question, --repeats times."""
        return [(question, sample) for question in self.questions for sample in range(self.config.repeats)]

    def trained_with(self) -> dict[str, str]:
        """The agents of --agent that were trained here, each with the environment of its training."""
        agents = {name: self.agents[name] for name in self.config.agent}
        return {name: agent.config.env for name, agent in agents.items() if agent.trained}

    def lines_about(self, agent: NamedAgent) -> list[str]:
        """Which agent plays, and notes on how it was trained."""
        environments = ",".join(self.environments) or "none"
        lines = [agent.describe(environment=environments, seed=self.seed)]
        known = count_in_training_files(agent, self.questions)
        if known:
            lines.append(
                f"Note: {known:,} of these {len(self.questions):,} questions are in the files of the agent's "
                "training, as far as these are here; `python -m prompt_r1.data split` holds some out"
            )
        if agent.config.reward:
            # The name was read from the agent's folder, which may come from anyone, so it is not imported.
            lines.append(
                f"Note: the agent was trained with --reward {agent.config.reward}. `reward` in the "
                "results is the reward of eq. 15 under --rule, not this one"
            )
        return lines

    def fields_of(self, system: System) -> RequestFields:
        """The fields of each request to a system's environment."""
        given = parse_fields(self.environments[system.environment].env_args)
        return {**given, **METHODS[system.method].fields}

    def open_environment(self, system: System, account: Account) -> Environment:
        """Open the environment that a system asks. It is mute for a method that needs none."""
        if not METHODS[system.method].needs_environment:
            return mute_environment()
        spec = system.environment
        return self._open(spec, self.environments[spec], self.fields_of(system), account)

    def open_optimizer(self, system: System, algorithm: Algorithm, account: Account) -> Environment:
        """Open the model that writes prompts in a system's search."""
        spec = self.config.optimizer_env or system.environment
        settings = self.environments.get(spec, self.config)
        fields = algorithm.optimizer_fields
        if self.config.max_env_usd and limit_in(fields) is None:
            # The authors of GEPA set no limit, but a limit of dollars needs it.
            fields = {**fields, "max_tokens": OPTIMIZER_REPLY}
        return self._open(spec, settings, fields, account)

    def _open(
        self, spec: str, settings: EvaluateConfig, fields: RequestFields, account: Account
    ) -> Environment:
        """Open an environment, which the caller closes. Each request to it has `fields`.

        Its calls are in the journal and the budget of `account`.
        """
        checked = check_environment(
            spec,
            replace(settings, env_args=json.dumps(fields)),
            trusted=trusted_environments(self.config, self.environments),
            prices=self.prices,
        )
        return open_environment(checked, account=account, seed=self.seed, device=self.device)


def count_in_training_files(agent: NamedAgent, questions: Sequence[Question]) -> int:
    """How many of the questions are in the files of an agent's training, as far as these are here."""
    if not agent.trained:
        return 0
    # The folder of an agent may come from anyone, so no code is run that it names.
    files = [name for name in agent.config.data if is_mini_data(name) or Path(name).is_file()]
    try:
        trained = find_questions(files, "train", agent.config.seed)
    except UsageError:  # The files have changed since the training.
        return 0
    keys = {question_key(question.text) for question in trained}
    return sum(question_key(question.text) in keys for question in questions)


def trusted_environments(config: EvaluateConfig, environments: Iterable[str]) -> Collection[str]:
    """The names that the user trusts, among those of all environments that an evaluation opens."""
    typed = [*config.env, config.optimizer_env]
    return trusted_names(typed=typed, opened=[*environments, config.optimizer_env])


def prices_of(config: EvaluateConfig, environments: Iterable[str]) -> dict[str, Price]:
    """The price of each environment by its name, and last of --optimizer-env."""
    names = []
    for spec in [*environments, config.optimizer_env]:
        names += spec.split(",") if spec else []
    return parse_prices(config.env_price, names)


def mute_environment() -> Environment:
    """The environment of a method that needs none."""
    return Environment([OwnSource(MuteEnvironment(), seed=0)])


def file_name(text: str) -> str:
    """A text as the name of a file. Other texts have other names."""
    name = re.sub(r"[^\w.-]+", "-", text)
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
