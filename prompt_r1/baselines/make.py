"""Make methods by name."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.names import AgentSpec, find_agent, resolve_agent
from prompt_r1.baselines.ask_once import FORMATS, AnswerFormat, AskOnce, ThinkThenAnswer
from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.gepa import gepa
from prompt_r1.baselines.imitation import FineTuned, Imitation, RejectionSampling
from prompt_r1.baselines.method import Method
from prompt_r1.baselines.opro import opro
from prompt_r1.baselines.optimise import Algorithm, OptimisedPrompt, PromptSearch, file_name
from prompt_r1.baselines.sft import one_turn_config
from prompt_r1.baselines.textgrad import textgrad
from prompt_r1.cli.command_line import command
from prompt_r1.config.environment import MINI_AGENT, is_mini, is_mini_data
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.methods import METHODS, SftConfig
from prompt_r1.data.questions import find_questions, sample_questions
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import Environments, parse_fields
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import System
from prompt_r1.reward import RULES
from prompt_r1.types import Question

ALGORITHMS: dict[str, Algorithm] = {"opro": opro, "textgrad": textgrad, "gepa": gepa}
# Request fields of the environment that answers, and of the model that writes prompts, as in the authors'
# code or paper.
TASK_FIELDS: dict[str, Mapping[str, object]] = {
    "cot": {"temperature": 0.0},
    "opro": {"temperature": 0.0, "max_tokens": 1024},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
}
OPTIMIZER_FIELDS: dict[str, Mapping[str, object]] = {
    "opro": {"temperature": 1.0, "max_tokens": 512},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
}


@dataclass
class MethodMaker:
    """Makes the methods of an evaluation. One environment and the agents of one AgentSpec are in memory."""

    config: EvaluateConfig
    systems: Mapping[System, AgentSpec]
    datasets: Sequence[str]  # of the questions that will be answered
    environments: Environments
    device: torch.device
    seed: int  # of what a method draws while it prepares
    folder: Path  # prepared results are in folder/SPEC/METHOD
    _environment: Environment | None = field(init=False, default=None)
    _opened: tuple[str, Mapping[str, object]] | None = field(init=False, default=None)  # SPEC, fields
    _agents: dict[str, Agent] = field(init=False, default_factory=dict)  # by path
    _loaded: AgentSpec | None = field(init=False, default=None)

    async def make(self, system: System) -> Method:
        """The method of a system, before its preparation."""
        agent, config = self.systems[system], self.config
        if self._agents and agent != self._loaded:
            self._agents = {}
            gc.collect()  # an engine is part of a reference cycle
        self._loaded = agent
        environment = await self._open(system)
        spec = system.environment or agent.config.env
        answer_format = FORMATS["only" if is_mini(spec) else "tags"]
        folder = self.folder / file_name(spec) / system.method
        trained, untrained = partial(self._load, agent), partial(self._load_start, agent)
        play = partial(self._player, agent.config.rule)
        match system.method:
            case "direct":
                return AskOnce(environment, answer_format)
            case "cot":
                return ThinkThenAnswer(environment, answer_format)
            case "opro" | "textgrad" | "gepa" as name:
                return self._optimised_prompt(name, environment, spec, answer_format, folder)
            case "sft" | "bc" | "rft" as name:
                return self._fine_tuned(name, agent, environment, folder)
            case "grpo-only":
                return self._player("alone", partial(self._load, trained_alone(config.grpo_agent)), None)
            case "untrained":
                return play(untrained, environment)
            case "agent-only":
                return play(trained, None)
            case "prompt-r1":
                return play(trained, environment)
        raise AssertionError(f"no method {system.method!r}")

    async def _open(self, system: System) -> Environment:
        """The system's environment, with the request fields of its method."""
        fields = {**parse_fields(self.config.env_args), **TASK_FIELDS.get(system.method, {})}
        # A method that asks no environment gets the mini world, which needs no key.
        wanted = system.environment or "mini", fields
        if self._environment is None or self._opened != wanted:
            self._environment = None  # a local model is in memory once
            opened = self.environments.open(wanted[0], fields=fields)
            await opened.check()  # before large agents are loaded
            self._environment, self._opened = opened, wanted
        return self._environment

    def _load(self, spec: AgentSpec) -> Agent:
        """An agent, ready to play."""
        path = str(spec.path)
        if path not in self._agents:
            self._agents[path] = load_agent(spec.path, spec.config, self.device)
        return self._agents[path]

    def _load_start(self, spec: AgentSpec) -> Agent:
        """The agent before training; the agent itself if this project did not train it."""
        return self._load(replace(spec, path=find_agent(spec.start, spec.config.seed)))

    def _player(
        self, rule: str, load: Callable[[], Agent], environment: Environment | None, *, thinks: bool = True
    ) -> AgentMethod:
        """A method that plays games with an agent; the arguments are those of `AgentMethod`."""
        config = self.config
        return AgentMethod(load, environment, RULES[rule], config.temperature, config.top_p, thinks)

    def _fine_tuned(self, name: str, agent: AgentSpec, environment: Environment, folder: Path) -> Method:
        """`sft`, `bc` or `rft`, which fine-tune the user's agent from its start."""
        start, game = agent.start, agent.config
        if name == "bc" and start != MINI_AGENT:
            raise UsageError(
                "bc imitates the demonstrations of the mini agent: leave it out with other agents"
            )
        settings = SftConfig(
            agent=start,
            seed=self.seed,
            lr=3e-3 if start == MINI_AGENT else 1e-4,  # at LLaMA-Factory's rate the mini agent does not learn
            rank=8 if name == "sft" else 16,
            device=str(self.device),
        )
        if name == "sft":
            game = one_turn_config(settings)
        learned = partial(self._load, AgentSpec(folder / "agent", game, start))
        if name == "sft":
            return FineTuned(settings, game, folder, self._player(game.rule, learned, None, thinks=False))
        player = self._player(game.rule, learned, environment)
        if name == "bc":
            return Imitation(settings, game, folder, player)
        asked = environment, self.config.optimize_calls
        return RejectionSampling(settings, game, folder, player, partial(self._load_start, agent), *asked)

    def _optimised_prompt(
        self, name: str, environment: Environment, spec: str, answer_format: AnswerFormat, folder: Path
    ) -> Method:
        """A search for a prompt, with the model that writes prompts."""
        config = self.config
        optimizer = self.environments.open(
            config.optimizer_env or ("mini-optimizer" if is_mini(spec) else spec),
            fields=OPTIMIZER_FIELDS.get(name, {}),
            price=config.optimizer_price,
        )

        def open_search(dataset: str) -> PromptSearch:
            described = f"{name} ({dataset})"
            return PromptSearch(described, environment, optimizer, answer_format, config.optimize_calls)

        algorithm = partial(ALGORITHMS[name], examples=config.optimize_examples, seed=self.seed)
        return OptimisedPrompt(algorithm, open_search, self.datasets, folder)


def trained_alone(name: str) -> AgentSpec:
    """The agent of --grpo-agent. Raises UsageError unless it was trained without environment."""
    spec = resolve_agent(name) if name else None
    if spec is None or spec.config.env != "none":
        raise UsageError(
            "grpo-only needs an agent that was trained without environment: run "
            f"`{command('train', '--env', 'none')}` and give --grpo-agent RUN"
        )
    return spec


def preparation_questions(
    method: str, config: EvaluateConfig, seed: int
) -> tuple[list[Question], list[Question]]:
    """Training and validation questions, if the method needs them; the mini world brings its own."""
    if not METHODS[method].training:
        return [], []
    own = ("mini",) if all(map(is_mini_data, config.data)) else ()
    train = find_questions(config.train_data or own, "train", seed)
    return train, sample_questions(config.val_data or own, "validation", seed, 0)
