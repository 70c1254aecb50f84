"""Make methods by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agent.agent import Agent, open_agent
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
from prompt_r1.config.methods import METHODS, MethodConfig, SftConfig
from prompt_r1.data.questions import find_questions, sample_questions
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import Environments, parse_fields
from prompt_r1.errors import UsageError
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
class MethodContext:
    """What a method is made from: its environment, agents and settings. Agents are loaded when needed."""

    environment: Environment
    spec: str  # the environment's name for users
    environments: Environments  # opens other ones
    datasets: Sequence[str]  # of the questions that will be answered
    agent: AgentSpec  # that the user named
    device: torch.device
    config: EvaluateConfig
    seed: int  # of what a method draws while it prepares
    folder: Path  # prepared results are in folder/SPEC/METHOD
    agents: dict[str, Agent] = field(default_factory=dict)  # those that are loaded, by path

    def prepared(self, name: str) -> Path:
        """The folder of what a method prepares for this environment."""
        return self.folder / file_name(self.spec) / name

    def load(self, spec: AgentSpec) -> Agent:
        """An agent, ready to play."""
        path = str(spec.path)
        if path not in self.agents:
            self.agents[path] = open_agent(spec, self.device)
        return self.agents[path]

    def untrained(self) -> Agent:
        """The agent before training; the agent itself if this project did not train it."""
        start, config = self.agent.start, self.agent.config
        return self.load(AgentSpec(find_agent(start, config.seed), config, start))

    def player(
        self,
        load: Callable[[], Agent],
        environment: Environment | None,
        rule: str = "",
        *,
        thinks: bool = True,
    ) -> AgentMethod:
        """A method that plays games with an agent; the other arguments are those of `AgentMethod`."""
        config, rule = self.config, rule or self.agent.config.rule
        return AgentMethod(load, environment, RULES[rule], config.temperature, config.top_p, thinks)


def request_fields(name: str, env_args: str) -> dict[str, object]:
    """The request fields of a method's environment: --env-args, then those of its authors."""
    return {**parse_fields(env_args), **TASK_FIELDS.get(name, {})}


def make_method(name: str, context: MethodContext) -> Method:
    """The method called `name`, one of METHODS."""
    config, environment = context.config, context.environment
    answer_format = choose_answer_format(config, context.spec)
    trained = partial(context.load, context.agent)
    match name:
        case "direct":
            return AskOnce(environment, answer_format)
        case "cot":
            return ThinkThenAnswer(environment, answer_format)
        case "opro" | "textgrad" | "gepa":
            return optimised_prompt(name, context, answer_format)
        case "sft" | "bc" | "rft":
            return fine_tuned(name, context)
        case "grpo-only":
            return context.player(partial(context.load, trained_alone(config.grpo_agent)), None, "alone")
        case "untrained":
            return context.player(context.untrained, environment)
        case "agent-only":
            return context.player(trained, None)
        case "prompt-r1":
            return context.player(trained, environment)
    raise AssertionError(f"no method {name!r}")


def trained_alone(name: str) -> AgentSpec:
    """The agent of --grpo-agent. Raises UsageError unless it was trained without environment."""
    spec = resolve_agent(name) if name else None
    if spec is None or spec.config.env != "none":
        raise UsageError(
            "grpo-only needs an agent that was trained without environment: run "
            f"`{command('train', '--env', 'none')}` and give --grpo-agent RUN"
        )
    return spec


def fine_tuned(name: str, context: MethodContext) -> Method:
    """`sft`, `bc` or `rft`, which fine-tune the user's agent from its start."""
    config, start, game = context.config, context.agent.start, context.agent.config
    if name == "bc" and start != MINI_AGENT:
        raise UsageError("bc imitates the demonstrations of the mini agent: leave it out with other agents")
    settings = SftConfig(
        agent=start,
        seed=context.seed,
        lr=3e-3 if start == MINI_AGENT else 1e-4,  # at LLaMA-Factory's rate the mini agent does not learn
        device=str(context.device),
    )
    if name == "sft":
        game = one_turn_config(settings)
    else:
        settings = replace(settings, rank=16)
    folder = context.prepared(name)
    learned = partial(context.load, AgentSpec(folder / "agent", game, start))
    if name == "sft":
        return FineTuned(settings, game, folder, context.player(learned, None, game.rule, thinks=False))
    player = context.player(learned, context.environment)
    if name == "bc":
        return Imitation(settings, game, folder, player)
    asked = context.environment, config.optimize_calls
    return RejectionSampling(settings, game, folder, player, context.untrained, *asked)


def optimised_prompt(name: str, context: MethodContext, answer_format: AnswerFormat) -> Method:
    """A search for a prompt, with the model that writes prompts."""
    config = context.config
    spec = config.optimizer_env or ("mini-optimizer" if is_mini(context.spec) else context.spec)
    optimizer = context.environments.open(
        spec, fields=OPTIMIZER_FIELDS.get(name, {}), price=config.optimizer_price
    )

    def open_search(dataset: str) -> PromptSearch:
        described = f"{name} ({dataset})"
        return PromptSearch(described, context.environment, optimizer, answer_format, config.optimize_calls)

    algorithm = partial(ALGORITHMS[name], examples=config.optimize_examples, seed=context.seed)
    return OptimisedPrompt(algorithm, open_search, context.datasets, context.prepared(name))


def preparation_questions(
    methods: Iterable[str], config: EvaluateConfig, seed: int
) -> tuple[list[Question], list[Question]]:
    """Training and validation questions, if one of the methods needs them; the mini world brings its own."""
    if not any(METHODS[method].training for method in methods):
        return [], []
    own = ("mini",) if all(map(is_mini_data, config.data)) else ()
    train = find_questions(config.train_data or own, "train", seed)
    return train, sample_questions(config.val_data or own, "validation", seed, 0)


def choose_answer_format(config: MethodConfig, spec: str) -> AnswerFormat:
    """The answer format to request: by default tags, which the mini world does not understand."""
    if config.answer_format != "auto":
        return FORMATS[config.answer_format]
    return FORMATS["only" if is_mini(spec) else "tags"]
