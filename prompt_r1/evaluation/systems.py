"""Which systems an evaluation runs: methods × environments × agents, each with the digest of its settings."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path

from prompt_r1.agent.names import AgentSpec, find_agent, newest_mini_run, resolve_agent, trained_config
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import identifying_values
from prompt_r1.config.methods import METHODS, MethodConfig
from prompt_r1.config.train import TrainConfig
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import System

USUAL_METHODS = ("direct", "untrained", "prompt-r1")
WITHOUT_ENVIRONMENT = ("sft", "grpo-only", "agent-only")
WITH_AGENT = (*WITHOUT_ENVIRONMENT, "untrained", "prompt-r1")
# From questions for training.
LEARNING = ("cot-few-shot", "self-consistency", "opro", "textgrad", "gepa", "sft")
TRAINED_ALONE = ("sft", "grpo-only")  # by another reward than the game's
GAMES = ("untrained", "agent-only", "prompt-r1")  # whose answers follow from agent, game and environment
TRANSFERRED = ("direct", "prompt-r1")  # what Table 5 runs with every environment
NO_AGENT = AgentSpec("", TrainConfig(), "")


@dataclass(frozen=True)
class Entrant:
    """A system that answers all questions, with the agent that it needs (NO_AGENT: none)."""

    system: System
    agent: AgentSpec
    setting: str


def lineup(config: EvaluateConfig, agents: Mapping[str, AgentSpec], seed: int) -> list[Entrant]:
    """The systems, in the order of METHODS. --tables runs what Tables 2 to 4 need with the first environment
    and agent, and what Table 5 needs with all of them.
    """
    wanted = methods_of(config)
    specs = environments_of(config, agents)
    entrants: dict[System, Entrant] = {}
    for method in (name for name in METHODS if name in wanted):
        everywhere = not config.tables or method in TRANSFERRED
        for spec in [""] if method in WITHOUT_ENVIRONMENT else specs if everywhere else specs[:1]:
            names = list(agents) if everywhere else list(agents)[:1]
            for name in names if method in WITH_AGENT else [""]:
                agent = agents[name or next(iter(agents))] if agents else NO_AGENT
                label = _label(method, name, agent, config)
                system = System(method, spec, label)
                entrants.setdefault(system, Entrant(system, agent, _setting(system, agent, config, seed)))
    return list(entrants.values())


def methods_of(config: EvaluateConfig) -> tuple[str, ...]:
    """--method; with --tables all, but grpo-only only where its agent is given."""
    everything = tuple(name for name in METHODS if name != "grpo-only" or config.grpo_agent)
    return tuple(config.method) or (everything if config.tables else USUAL_METHODS)


def left_out(config: EvaluateConfig) -> str:
    """What --tables could not run, and how it can."""
    if "grpo-only" in methods_of(config) or config.method or not config.tables:
        return ""
    return ("\ngrpo-only is left out: train its agent with `python train.py --env none`, and give "
            "--grpo-agent RUN\n")  # fmt: skip


def _label(method: str, name: str, agent: AgentSpec, config: EvaluateConfig) -> str:
    """The agent that answers: not the trained one itself for every method."""
    match method:
        case "grpo-only":
            return config.grpo_agent
        case "sft":
            return config.sft_agent or agent.start
        case "untrained":
            return agent.start
    return name


def resolve_agents(config: EvaluateConfig) -> dict[str, AgentSpec]:
    """The agents by their names; none where no method needs one."""
    wanted = methods_of(config)
    needed = any(method in WITH_AGENT for method in wanted)
    needed |= "self-consistency" in wanted and not config.samples
    if not config.agent and not needed:
        return {}
    names = config.agent or (str(newest_mini_run()),)
    known = partial(resolve_agent, kv_tokens=config.kv_tokens, tokenizer=config.agent_tokenizer,
                    prompts=config.agent_prompts)  # fmt: skip
    return {name: known(name) for name in names}


def environments_of(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> Sequence[str]:
    """--env, or those that the agents were trained with."""
    specs = config.env or tuple(dict.fromkeys(agent.config.env for agent in agents.values()))
    if not specs:
        raise UsageError("nobody to ask: give --env SPEC, or an --agent that was trained with one")
    return specs


def common_seed(config: EvaluateConfig, agents: Mapping[str, AgentSpec]) -> int:
    """--seed, or the agents' own. Mini worlds of other seeds have other questions."""
    seeds = {agent.config.seed: name for name, agent in agents.items()}
    if config.seed >= 0 or not seeds:
        return max(config.seed, 0)
    if len(seeds) > 1 and any(name.split(":")[0] == "mini" for name in config.data):
        raise UsageError(f"{' and '.join(seeds.values())} were trained in different mini worlds: give "
                         "--seed, or evaluate them one by one")  # fmt: skip
    return next(iter(seeds))


def trained_with(agents: Mapping[str, AgentSpec]) -> dict[str, str]:
    """Agent → the environment it was trained with; agents that were trained here only."""
    return {name: agent.config.env for name, agent in agents.items()
            if trained_config(agent.tokenizer or agent.path)}  # fmt: skip


def _setting(system: System, agent: AgentSpec, config: EvaluateConfig, seed: int) -> str:
    """A digest of all that shapes an answer, so that answers of another setting are never taken for these."""
    shapes: dict[str, object] = {"system": asdict(system), "seed": seed}
    shapes |= identifying_values(config)
    if system.method not in GAMES:
        shapes |= {f.name: getattr(config, f.name) for f in fields(MethodConfig)}
    if agent is not NO_AGENT and system.method in (*WITH_AGENT, "self-consistency"):
        own = system.method in ("agent-only", "prompt-r1", "self-consistency")
        shapes["weights"] = digest_of(agent.path if own else find_agent(system.agent, agent.config.seed))
        shapes |= asdict(agent.config.game)
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]


@cache
def digest_of(path: str | Path) -> str:
    """What tells the weights of an agent from others: its files, or the name of what is on a hub."""
    digest = hashlib.sha256(b"" if Path(path).is_dir() else str(path).encode())
    for file in sorted(Path(path).glob("*.safetensors")):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
