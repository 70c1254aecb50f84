"""Make methods by name."""

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agent.agent import Agent, open_agent
from prompt_r1.agent.names import AgentSpec, find_agent, resolve_agent
from prompt_r1.baselines.ask_once import FORMATS, STEP_BY_STEP, AnswerFormat, AskOnce, ThinkThenAnswer
from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.gepa import gepa
from prompt_r1.baselines.imitation import Imitation, RejectionSampling
from prompt_r1.baselines.method import Method
from prompt_r1.baselines.opro import opro
from prompt_r1.baselines.optimise import OptimisedPrompt, PromptSearch
from prompt_r1.baselines.self_consistency import SelfConsistency
from prompt_r1.baselines.sft import FineTuned, one_turn_config
from prompt_r1.baselines.textgrad import textgrad
from prompt_r1.cli.command_line import command
from prompt_r1.config.environment import MINI_AGENT, is_mini, is_mini_data
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.methods import METHODS, MethodConfig, SftConfig
from prompt_r1.data.questions import find_questions, sample_questions
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.specs import Environments, parse_fields, parse_json_object
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.systems import LEARNING
from prompt_r1.playing import PlaySettings
from prompt_r1.reward import RULES
from prompt_r1.types import Question

SAMPLED = PlaySettings(temperature=1.0)  # greedy games of a question are all the same
ALGORITHMS: dict[str, Callable[..., Awaitable[str]]] = {
    "random-search": partial(opro, informed=False),
    "opro": opro,
    "textgrad": textgrad,
    "gepa": gepa,
}
# Request fields of the environment that answers, as in the authors' code or paper; other methods: --env-args.
TASK_FIELDS: dict[str, Mapping[str, object]] = {
    "cot": {"temperature": 0.0},
    "cot-few-shot": {"temperature": 0.0},
    "self-consistency": {"temperature": 0.7},
    **{key: {"temperature": 0.0, "max_tokens": 1024} for key in ("random-search", "opro")},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
}
# Request fields of the model that writes prompts, as in the authors' code.
OPTIMIZER_FIELDS: dict[str, Mapping[str, object]] = {
    **{key: {"temperature": 1.0, "max_tokens": 512} for key in ("random-search", "opro")},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
    "gepa": {},
}


class AgentCache:
    """Loads each agent of an evaluation when it is first needed; `spec` is the one that the user named."""

    def __init__(self, spec: AgentSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._loaded: dict[str, Agent] = {}

    def load(self, spec: AgentSpec) -> Agent:
        """An agent, ready to play."""
        path = str(spec.path)
        if path not in self._loaded:
            self._loaded[path] = open_agent(spec, self.device)
        return self._loaded[path]

    def trained(self) -> Agent:
        """The agent that the user named."""
        return self.load(self.spec)

    def untrained(self) -> Agent:
        """The agent before training; the agent itself if this project did not train it."""
        start, config = self.spec.start, self.spec.config
        return self.load(AgentSpec(find_agent(start, config.seed), config, start))


@dataclass(frozen=True)
class MethodContext:
    """What a method is made from: its environment, agents and settings."""

    environment: Pool
    spec: str  # the environment's name for users
    environments: Environments  # opens other ones
    datasets: Sequence[str]  # of the questions that will be answered
    agents: AgentCache
    config: EvaluateConfig
    seed: int  # of what a method draws while it prepares
    folder: Path  # prepared results are in folder/SPEC/METHOD

    def subfolder(self, name: str) -> Path:
        """The folder for what a method prepares."""
        return self.folder / folder_name(self.spec) / name

    def agent_method(
        self, load: Callable[[], Agent], environment: Pool | None, *, rule: str, thinks: bool = True
    ) -> AgentMethod:
        """A method that plays games with an agent; the other arguments are those of `AgentMethod`."""
        how = PlaySettings(self.config.temperature, self.config.top_p)
        return AgentMethod(load, environment, RULES[rule], how, thinks)


def request_fields(name: str, config: MethodConfig, env_args: str) -> dict[str, object]:
    """The request fields of a method's environment: --env-args, then its authors', then --method-args.

    A field that --method-args sets to null is not sent.
    """
    flag, example = "--method-args", '{"cot": {"temperature": 0.5}}'
    given = parse_json_object(config.method_args, flag=flag, example=example)
    for method, values in given.items():
        if method not in METHODS or not isinstance(values, dict):
            raise UsageError(
                f"{flag} takes a JSON object such as {example}, with names of methods, not "
                f"{method!r}: {values!r}"
            )
    own = parse_fields(json.dumps(given.get(name, {})), flag=flag)
    fields = {**parse_fields(env_args), **TASK_FIELDS.get(name, {}), **own}
    return {field: value for field, value in fields.items() if value is not None}


def make_method(name: str, context: MethodContext) -> Method:
    """The method called `name`, one of METHODS."""
    config, agents, environment = context.config, context.agents, context.environment
    answer_format, rule = choose_answer_format(config, context.spec), agents.spec.config.rule
    match name:
        case "direct":
            return AskOnce(environment, answer_format)
        case "cot":
            return ThinkThenAnswer(environment, answer_format)
        case "cot-few-shot":
            shots, seed = config.shots, context.seed
            return AskOnce(environment, answer_format, hint=STEP_BY_STEP, shots=shots, seed=seed)
        case "self-consistency":
            chain = AskOnce(environment, answer_format, hint=STEP_BY_STEP)
            agent = context.agent_method(agents.trained, environment, rule=rule)
            return SelfConsistency(chain, agent, samples=config.samples)
        case "random-search" | "opro" | "textgrad" | "gepa":
            return optimised_prompt(name, context, answer_format)
        case "sft" if config.sft_agent:
            load = partial(agents.load, resolve_agent(config.sft_agent, kv_tokens=0))
            return context.agent_method(load, None, rule="alone", thinks=False)
        case "sft" | "bc" | "rft":
            return fine_tuned(name, context)
        case "grpo-only":
            load = partial(agents.load, trained_alone(config.grpo_agent))
            return context.agent_method(load, None, rule="alone")
        case "untrained":
            return context.agent_method(agents.untrained, environment, rule=rule)
        case "best-of-n":
            sampled = replace(context.agent_method(agents.untrained, environment, rule=rule), how=SAMPLED)
            return SelfConsistency(sampled, sampled, samples=config.best_of)
        case "agent-only":
            return context.agent_method(agents.trained, None, rule=rule)
        case "prompt-r1":
            return context.agent_method(agents.trained, environment, rule=rule)
    raise AssertionError(f"no method {name!r}")


def trained_alone(name: str) -> AgentSpec:
    """The agent of --grpo-agent. Raises UsageError unless it was trained without environment."""
    spec = resolve_agent(name, kv_tokens=0) if name else None
    if spec is None or spec.config.env != "none":
        raise UsageError(
            "grpo-only needs an agent that was trained without environment: run "
            f"`{command('train', '--env', 'none')}` and give --grpo-agent RUN"
        )
    return spec


def fine_tuned(name: str, context: MethodContext) -> Method:
    """`sft`, `bc` or `rft`, which fine-tune the user's agent from its start."""
    config, agents, start = context.config, context.agents, context.agents.spec.start
    if name == "bc" and start != MINI_AGENT:
        raise UsageError("bc imitates the demonstrations of the mini agent: leave it out with other agents")
    folder, device = context.subfolder(name), agents.device
    settings = SftConfig(
        agent=start,
        data=config.train_data,
        seed=context.seed,
        lr=config.sft_lr,
        checkpointing=device.type == "cuda",
        device=str(device),
    )
    if name == "sft":
        game = one_turn_config(settings)
        learned = partial(agents.load, AgentSpec(folder / "agent", game, start))
        player = context.agent_method(learned, None, rule=game.rule, thinks=False)
        return FineTuned(settings, game, folder, player)
    settings = replace(settings, lr=config.imitation_lr, rank=16, alpha=32.0)
    game = agents.spec.config
    learned = partial(agents.load, AgentSpec(folder / "agent", game, start))
    player = context.agent_method(learned, context.environment, rule=game.rule)
    if name == "bc":
        return Imitation(settings, game, folder, player)
    rounds, calls = config.rft_rounds, config.rft_calls
    return RejectionSampling(
        settings, game, folder, player, agents.untrained, context.environment, rounds, calls
    )


def optimised_prompt(name: str, context: MethodContext, answer_format: AnswerFormat) -> Method:
    """A search for a prompt, with the model that writes prompts."""
    config = context.config
    spec = config.optimizer_env or ("mini-optimizer" if is_mini(context.spec) else context.spec)
    if config.optimizer_args:
        fields: Mapping[str, object] = parse_fields(config.optimizer_args, flag="--optimizer-args")
    else:
        fields = OPTIMIZER_FIELDS[name]
    optimizer = context.environments.open(spec, fields=fields, prices=config.optimizer_price)
    folder = context.subfolder(name)

    def open_search(dataset: str) -> PromptSearch:
        return PromptSearch(
            f"{name} ({dataset})" if dataset else name,
            context.environment,
            optimizer,
            answer_format,
            max_calls=config.optimize_calls,
            folder=folder / folder_name(dataset or "all"),
        )

    algorithm = partial(ALGORITHMS[name], config=config, seed=context.seed)
    return OptimisedPrompt(algorithm, open_search, context.datasets)


def folder_name(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", text)


def preparation_questions(
    methods: Iterable[str], config: EvaluateConfig, seed: int
) -> tuple[list[Question], list[Question]]:
    """Training and validation questions, if one of the methods needs them; the mini world brings its own."""
    if not set(methods) & set(LEARNING):
        return [], []
    own = ("mini",) if all(map(is_mini_data, config.data)) else ()
    train = find_questions(config.train_data or own, "train", seed, config.data_args)
    return train, sample_questions(config.val_data or own, "validation", seed, 0, config.data_args)


def choose_answer_format(config: MethodConfig, spec: str) -> AnswerFormat:
    """The answer format to request: by default tags, which the mini world does not understand."""
    if config.answer_format != "auto":
        return FORMATS[config.answer_format]
    return FORMATS["only" if is_mini(spec) else "tags"]
