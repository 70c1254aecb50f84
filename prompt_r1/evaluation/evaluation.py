"""What an evaluation compares.

This file does not import torch, because an `Evaluation` is made before torch is imported (preflight.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.specs import CheckedEnvironment, check_environment, parse_fields, trusted_names
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.searches import Data, RequestFields
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.programs.files import file_name
from prompt_r1.settings.agent import EnvironmentConfig, names_of
from prompt_r1.types import Question

if TYPE_CHECKING:  # scores.py imports torch.
    from prompt_r1.evaluation.scores import OwnMetric

Repeat = tuple[Question, int]
"""A question with the number of its answer, from 0: each system answers it --repeats times."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation compares. `read_evaluation` (preflight.py) makes it."""

    config: EvaluateConfig
    seed: int
    metrics: Mapping[str, "OwnMetric"]  # the user's own metrics, by their names
    agents: Mapping[str, NamedAgent]  # the agents of --agent and --grpo-agent, by their names
    # Each system, and its agent before any fine-tuning; None for a method without an agent.
    systems: Mapping[System, NamedAgent | None]
    environments: Mapping[str, EnvironmentConfig]  # each SPEC, and the settings by which it is asked
    # The questions are read last, when everything else has been checked.
    questions: Sequence[Question] = ()
    # The questions that prepare methods. There are none if no method needs them.
    data: Data = field(default_factory=Data)

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

    @cached_property
    def repeats(self) -> list[Repeat]:
        """What each system answers: every question, --repeats times."""
        return [(question, sample) for question in self.questions for sample in range(self.config.repeats)]

    @property
    def specs(self) -> list[str]:
        """The environments that are asked, and last the optimiser of --optimizer-env."""
        specs = [*self.environments, self.config.optimizer_env]
        return [spec for spec in specs if spec]

    @cached_property
    def prices(self) -> dict[str, Price]:
        """The price of each name in `specs`."""
        return parse_prices(self.config.env_price, [name for spec in self.specs for name in names_of(spec)])

    def fields_of(self, system: System) -> RequestFields:
        """The fields of each request to a system's environment."""
        given = parse_fields(self.environments[system.environment].env_args)
        return {**given, **METHODS[system.method].fields}

    def check_environment(self, spec: str, fields: RequestFields | None = None) -> CheckedEnvironment:
        """Check one of `specs` before it is opened. `fields` of its requests replace --env-args.

        Raises UsageError if it cannot be opened.
        """
        settings = self.environments.get(spec, self.config)
        trusted = trusted_names(typed=[*self.config.env, self.config.optimizer_env], opened=self.specs)
        return check_environment(spec, settings, trusted=trusted, prices=self.prices, fields=fields)
