"""Choose systems: methods × environments × agents.

Warns of test questions that their agents and prompts were trained or chosen on.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

from prompt_r1.agent.names import AgentSpec, find_agent, newest_mini_run, resolve_agent, trained_config
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.environment import HELD_OUT, is_mini_data
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.methods import METHODS, NOT_IN_PAPER, RIVALS, SEARCHES, MethodConfig
from prompt_r1.data.files import question_key
from prompt_r1.data.questions import find_questions
from prompt_r1.environments.specs import parse_json_object
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import System
from prompt_r1.tasks.packages import is_task
from prompt_r1.types import Question

DEFAULT_METHODS = ("direct", "untrained", "prompt-r1")
WITHOUT_ENVIRONMENT = ("sft", "grpo-only", "agent-only")
FROM_START = ("sft", "untrained", *RIVALS)  # the agent before training
WITH_AGENT = (*WITHOUT_ENVIRONMENT, "untrained", *RIVALS, "prompt-r1")
# These learn from training questions.
LEARNING = ("cot-few-shot", "self-consistency", *SEARCHES, "sft", "rft")
GAMES = ("untrained", "agent-only", "prompt-r1")  # not affected by other methods' settings
IN_TABLE_5 = ("direct", "prompt-r1")  # run with every environment
AGENT_FILES = (
    "*.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
NO_AGENT = AgentSpec("", AgentConfig(), "")


@dataclass(frozen=True)
class SystemSetup:
    """A system, the agent that it needs (NO_AGENT: none) and the digest of its settings."""

    system: System
    agent: AgentSpec
    setting: str


def choose_systems(config: EvaluateConfig, agents: Mapping[str, AgentSpec], seed: int) -> list[SystemSetup]:
    """The systems to evaluate, in the order of METHODS.

    --tables runs the methods of Table 5 with all environments and agents, the others with the first ones.
    """
    wanted = methods_of(config)
    specs = environments_of(config, agents)
    setups: dict[System, SystemSetup] = {}
    for method in METHODS:
        if method not in wanted:
            continue
        environments, names = specs, list(agents)
        if config.tables and method not in IN_TABLE_5:
            environments, names = specs[:1], names[:1]
        if method in WITHOUT_ENVIRONMENT:
            environments = [""]
        if method not in WITH_AGENT:
            names = [""]
        for environment in environments:
            for name in names:
                agent = agents[name or next(iter(agents))] if agents else NO_AGENT
                system = System(method, environment, _answering_agent(method, name, agent, config))
                setup = SystemSetup(system, agent, _digest(system, agent, config, seed))
                setups.setdefault(system, setup)
    return list(setups.values())


def methods_of(config: EvaluateConfig) -> tuple[str, ...]:
    """--method; by default three methods, with --tables the paper's (grpo-only if its agent is given)."""
    if config.method:
        return config.method
    if config.tables:
        left_out = NOT_IN_PAPER if config.grpo_agent else (*NOT_IN_PAPER, "grpo-only")
        return tuple(name for name in METHODS if name not in left_out)
    return DEFAULT_METHODS


def _answering_agent(method: str, name: str, agent: AgentSpec, config: EvaluateConfig) -> str:
    """The name of the agent that answers, which for some methods is not the trained one."""
    match method:
        case "grpo-only":
            return config.grpo_agent
        case "sft" if config.sft_agent:
            return config.sft_agent
    return agent.start if method in FROM_START else name


def resolve_agents(config: EvaluateConfig) -> dict[str, AgentSpec]:
    """The agents by their names; none if no method needs one."""
    need_one = WITH_AGENT if config.samples else (*WITH_AGENT, "self-consistency")
    if not config.agent and not set(need_one) & set(methods_of(config)):
        return {}
    agents = {}
    for name in config.agent or (str(newest_mini_run()),):
        spec = resolve_agent(name, kv_tokens=config.kv_tokens)
        trained = replace(spec.config, max_turns=config.max_turns or spec.config.max_turns)
        agents[name] = replace(spec, config=trained, is_newest=not config.agent)
    return agents


def environments_of(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> Sequence[str]:
    """--env, or the environments of the agents' training."""
    specs = config.env or tuple(dict.fromkeys(agent.config.env for agent in agents.values()))
    if not specs:
        raise UsageError("no environment to ask: give --env SPEC, or an --agent that was trained with one")
    return specs


def common_seed(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> int:
    """--seed, or that of the agents' runs. Mini worlds with different seeds have different questions."""
    seeds = {agent.config.seed: name for name, agent in agents.items()}
    if config.seed >= 0 or not seeds:
        return max(config.seed, 0)
    if len(seeds) > 1 and any(name.split(":")[0] == "mini" or is_task(name) for name in config.data):
        raise UsageError(
            f"{' and '.join(seeds.values())} were trained with other seeds, so on other questions: give "
            "--seed, or evaluate them one by one"
        )
    return next(iter(seeds))


def with_data_args(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> EvaluateConfig:
    """The config with the --data-args of the agents' runs, unless it has its own.

    Questions and environment of a task need the same ones. Raises UsageError for agents that differ.
    """
    args = {agent.config.data_args: name for name, agent in agents.items()}
    if config.data_args or not args or not any(map(is_task, config.data)):
        return config
    if len(args) > 1:
        raise UsageError(f"{' and '.join(args.values())} were trained with other sizes: give --data-args")
    return replace(config, data_args=next(iter(args)))


def trained_with(agents: Mapping[str, AgentSpec]) -> dict[str, str]:
    """Agent → the environment it was trained with; only agents that this project trained."""
    return {name: spec.config.env for name, spec in agents.items() if trained_config(spec.path)}


def training_files(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> list[str]:
    """The questions that agents were trained and validated on, and that methods prepare with."""
    own = [agent.config for name, agent in agents.items() if name in trained_with(agents)]
    names = [name for run in own for name in (*run.data, *run.val_data) if name != HELD_OUT]
    return [*names, *config.train_data, *config.val_data]


def leak_warnings(questions: Sequence[Question], names: Iterable[str]) -> list[str]:
    """A sentence for each of the files that contains some of the questions, or that cannot be checked.

    The splits of the mini world share no question, and those of a task no seed: they are not checked.
    """
    warnings = []
    for name in dict.fromkeys(names):
        if is_mini_data(name) or is_task(name):
            continue
        try:
            keys = {question_key(question.text) for question in find_questions([name], "", 0)}
        except UsageError as error:
            warnings.append(f"Warning: whether {name} contains test questions was not checked ({error}).")
            continue
        shared = Counter(question.dataset for question in questions if question_key(question.text) in keys)
        if shared:
            counts = ", ".join(f"{dataset} {count:,}" for dataset, count in sorted(shared.items()))
            warnings.append(
                f"Warning: {shared.total():,} of the {len(questions):,} test questions also occur in {name} "
                f"({counts}); `python -m prompt_r1.data audit` lists them."
            )
    return warnings


def _digest(system: System, agent: AgentSpec, config: EvaluateConfig, seed: int) -> str:
    """A digest of everything that affects an answer, so that answers of other settings are not reused.

    Files and folders count by their contents.
    """
    values: dict[str, object] = {"system": asdict(system), "seed": seed}
    values |= {f.name: _value_for(system, f.name, config) for f in fields(config) if _affects(system, f)}
    values["environment weights"] = _local_weights(system.environment)
    if agent is not NO_AGENT and system.method in (*WITH_AGENT, "self-consistency"):
        own = system.method in ("agent-only", "prompt-r1", "self-consistency")
        values["weights"] = digest_of(agent.path if own else find_agent(system.agent, agent.config.seed))
        values |= asdict(agent.config.game)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _affects(system: System, setting: Field[object]) -> bool:
    """Whether a setting affects the answers of a system."""
    method, methods = system.method, setting.metadata["methods"]
    if methods is not None:
        return method in methods
    prefix = setting.name.partition("_")[0]
    if prefix in METHODS:
        return method == prefix
    if setting.name in MethodConfig.__dataclass_fields__:
        return method not in GAMES
    return setting.metadata["identifies"] and bool(system.environment)  # a setting of its requests


def _value_for(system: System, name: str, config: EvaluateConfig) -> object:
    """The value of a setting, as far as it concerns a system: files by their contents."""
    value = getattr(config, name)
    match name:
        case "train_data" | "val_data":
            return [digest_of(file) for file in value]
        case "optimizer_env":
            return [value, _local_weights(value)]
        case "method_args":
            fields_by_method = parse_json_object(value, flag="--method-args", example='{"cot": {}}')
            return fields_by_method.get(system.method)
    return value


def _local_weights(spec: str) -> list[str]:
    """Digests of the models in this process that an environment consists of."""
    names = [part.strip() for part in spec.split(",")]
    return [digest_of(name.removeprefix("hf:")) for name in names if name.startswith("hf:")]


@cache
def digest_of(path: str | Path) -> str:
    """A digest of a file, or of an agent's weights, tokenizer and config; of any other name itself."""
    path = Path(path)
    digest = hashlib.sha256(b"" if path.exists() else str(path).encode())
    files = [path] if path.is_file() else [file for name in AGENT_FILES for file in sorted(path.glob(name))]
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
