"""Methods and agents by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agent.agent import Agent, open_agent
from prompt_r1.agent.names import AgentSpec, find_agent, resolve_agent
from prompt_r1.agent.remote import parse_remote
from prompt_r1.baselines.cot import ChainOfThought
from prompt_r1.baselines.direct import FORMATS, AnswerFormat, Direct
from prompt_r1.baselines.games import Game
from prompt_r1.baselines.gepa import gepa
from prompt_r1.baselines.method import Method
from prompt_r1.baselines.opro import opro
from prompt_r1.baselines.optimise import Bench, OptimisedPrompt, Search
from prompt_r1.baselines.self_consistency import SelfConsistency
from prompt_r1.baselines.textgrad import textgrad
from prompt_r1.config.methods import METHODS, MethodConfig, SftConfig
from prompt_r1.data.named import find_questions
from prompt_r1.environments.opening import MINI_SPECS, parse_fields
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

OPTIMIZER_FIELDS: dict[str, Mapping[str, object]] = {
    "opro": {"temperature": 1.0, "max_tokens": 512},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
    "gepa": {},
}


class AgentCache:
    """The agents of an evaluation, each loaded when it is first needed."""

    def __init__(self, known: AgentSpec, device: torch.device) -> None:
        self.known = known
        self.device = device
        self._loaded: dict[str, Agent] = {}

    def trained(self) -> Agent:
        """The agent as the user named it."""
        return self._load(self.known)

    def untrained(self) -> Agent:
        """What the agent was before training; the agent itself when it was not trained here."""
        start, config = self.known.start, self.known.config
        return self._load(
            self.known if parse_remote(start) else AgentSpec(find_agent(start, config.seed), config, start)
        )

    def other(self, known: AgentSpec) -> Agent:
        """Another agent, ready to play; each is loaded once."""
        return self._load(known)

    async def close(self) -> None:
        """Close the connections to those that are served elsewhere."""
        for player in self._loaded.values():
            await player.close()

    def _load(self, known: AgentSpec) -> Agent:
        path = str(known.path)
        if path not in self._loaded:
            self._loaded[path] = open_agent(known, self.device)
        return self._loaded[path]


def make_method(
    name: str,
    *,
    environment: Pool,
    spec: str,
    open_environment: Callable[..., Pool],
    agents: AgentCache,
    temperature: float,
    seed: int,
    config: MethodConfig,
    folder: Path | None,
) -> Method:
    """The method called `name` on `environment`, whose name for users is `spec`.

    `open_environment` (Environments.open) opens another one, that of an optimiser, say.
    `temperature` is that of an agent, `seed` that of what a method draws while it prepares. What it prepares
    lies in `folder`/SPEC/NAME (None: nothing is kept).
    Raises UsageError for a name that is none.
    """
    asks = answer_format(config, spec)
    play = partial(Game, game=agents.known.config, temperature=temperature)
    thought = partial(ChainOfThought, environment=environment, answer_format=asks, seed=seed)
    place = folder / re.sub(r"[^\w.-]+", "-", spec) / name if folder else None
    match name:
        case "direct":
            return Direct(environment, asks)
        case "cot":
            return thought(name)
        case "cot-few-shot":
            return thought(name, shots=config.shots)
        case "self-consistency":
            agent = play("prompt-r1", agents.trained, environment)
            return SelfConsistency(thought("cot"), agent, samples=config.samples)
        case "opro" | "textgrad" | "gepa":
            optimizer = open_optimizer(name, config, spec, open_environment)
            bench = Bench(name, environment, optimizer, asks, max_calls=config.optimize_calls, folder=place)
            return OptimisedPrompt(name, search(name, config, seed), bench)
        case "sft":
            return fine_tuned(config, agents, seed, temperature, place)
        case "grpo-only":
            known = trained_alone(config.grpo_agent)
            return Game(name, partial(agents.other, known), None, game=known.config, temperature=temperature)
        case "untrained":
            return play(name, agents.untrained, environment)
        case "agent-only":
            return play(name, agents.trained, None)
        case "prompt-r1":
            return play(name, agents.trained, environment)
    raise UsageError(f"there is no method {name!r}: choose one of {', '.join(METHODS)}")


def trained_alone(name: str) -> AgentSpec:
    """The agent of grpo-only."""
    known = resolve_agent(name, kv_tokens=0) if name else None
    if known is None or known.config.env != "none":
        raise UsageError("grpo-only needs an agent that was trained without environment: "
                         "run `python train.py --env none` and give --grpo-agent RUN")  # fmt: skip
    return known


def fine_tuned(
    config: MethodConfig, agents: AgentCache, seed: int, temperature: float, place: Path | None
) -> Method:
    """sft: of an agent that is there, or of one that it will make in `place` from the agent's start."""
    if config.sft_agent:
        known = resolve_agent(config.sft_agent, kv_tokens=0)
        load = partial(agents.other, known)
        return Game("sft", load, None, game=known.config, temperature=temperature, thinks=False)
    if parse_remote(agents.known.start):
        raise UsageError(
            "sft needs an agent's weights, not an endpoint: give --sft-agent with one that is there"
        )
    if place is None:
        raise UsageError("sft makes an agent: give --out DIR for it, or --sft-agent with one that is there")
    from prompt_r1.baselines.sft import FineTuned  # only here: it is also a program of its own

    settings = SftConfig(
        agent=agents.known.start,
        data=config.train_data,
        seed=seed,
        lr=config.sft_lr,
        checkpointing=agents.device.type == "cuda",
        device=str(agents.device),
    )
    return FineTuned(settings, place, load=agents.other, temperature=temperature)


def search(name: str, config: MethodConfig, seed: int) -> Search:
    """A prompt optimiser with its knobs."""
    match name:
        case "opro":
            return partial(
                opro,
                steps=config.opro_steps,
                per_step=config.opro_per_step,
                shown=config.opro_shown,
                threshold=config.opro_threshold,
                exemplars=config.opro_exemplars,
                train_limit=config.opro_train,
                seed_prompt=config.seed_prompt,
                seed=seed,
            )
        case "textgrad":
            return partial(
                textgrad,
                epochs=config.textgrad_epochs,
                updates=config.textgrad_updates,
                batch_size=config.textgrad_batch,
                short_value=config.textgrad_short_value,
                validation_limit=config.optimize_val,
                seed_prompt=config.seed_prompt,
                seed=seed,
            )
    return partial(
        gepa,
        max_task_calls=config.gepa_calls,
        batch_size=config.gepa_batch,
        validation_limit=config.optimize_val,
        seed_prompt=config.seed_prompt,
        seed=seed,
    )


def open_optimizer(name: str, config: MethodConfig, spec: str, open_environment: Callable[..., Pool]) -> Pool:
    """The model that writes prompts for an optimiser, with its authors' temperature and length."""
    wanted = config.optimizer_env or ("mini-optimizer" if is_mini(spec) else spec)
    fields = parse_fields(config.optimizer_args) if config.optimizer_args else OPTIMIZER_FIELDS[name]
    return open_environment(wanted, fields=fields, prices=config.optimizer_price)


def preparation_questions(
    config: MethodConfig, data: Sequence[str], seed: int
) -> tuple[list[Question], list[Question]]:
    """What methods may learn from and choose by; the mini world brings its own."""
    own = ("mini",) if all(name.split(":")[0] == "mini" for name in data) else ()
    train = find_questions(config.train_data or own, "train", seed)
    return train, find_questions(config.val_data or own, "validation", seed)


def answer_format(config: MethodConfig, spec: str) -> AnswerFormat:
    """How environments are asked for an answer: with tags, but for the mini world's, which cannot."""
    if config.answer_format != "auto":
        return FORMATS[config.answer_format]
    return FORMATS["only" if is_mini(spec) else "tags"]


def is_mini(spec: str) -> bool:
    """Is this (also) the mini world, in process or served?"""
    return any(part.split("@")[0] in MINI_SPECS for part in spec.split(","))
