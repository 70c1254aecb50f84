"""The methods of a comparison: what each method needs, and how it is made.

To make a method means to make a function (`Answer`) that predicts the answer to a question. This file does
not import torch, so that a wrong command line is reported at once.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import Answer, direct, think_then_answer
from prompt_r1.evaluation.gepa import GEPA
from prompt_r1.evaluation.opro import OPRO
from prompt_r1.evaluation.searches import Algorithm, Data, Fields, SearchSettings, file_name, optimised_prompt
from prompt_r1.evaluation.textgrad import TEXTGRAD
from prompt_r1.pair.asking import request_of
from prompt_r1.pair.named_agent import NamedAgent, find_agent

if TYPE_CHECKING:
    import torch

    from prompt_r1.pair.agent import Sampling


@dataclass(frozen=True)
class Needs:
    """What a method needs to answer."""

    environment: bool = True
    agent: Literal["", "trained", "start", "own"] = ""  # start: before the training; own: --grpo-agent
    training: bool = False  # whether training questions prepare the method
    validation: bool = False  # whether validation questions select what was prepared


@dataclass(frozen=True)
class Setup:
    """What a method is made from. Each method uses the parts that it needs."""

    method: str
    spec: str  # the environment's SPEC. Without an environment, the SPEC of the agent's training.
    environment: Environment  # A method that needs none has a mute environment.
    open_optimizer: Callable[[Fields], Environment]  # opens the model that writes prompts
    agent: NamedAgent  # --agent or --grpo-agent names it; trained here or not
    datasets: Sequence[str]  # the datasets of the questions that will be answered
    data: Data
    calls: int  # the limit of calls of a search or of rft; 0: the authors' number
    examples: int  # how many questions score a prompt; 0: the authors' number
    seed: int  # the seed of the preparation
    sampling: "Sampling"  # how the agent's tokens are sampled in games
    device: "torch.device"
    results: Path  # the folder of the evaluation

    @property
    def needs(self) -> Needs:
        """What the method needs."""
        return METHODS[self.method].needs

    @property
    def request(self) -> str:
        """How the answer is requested."""
        return request_of(self.spec)

    @property
    def folder(self) -> Path:
        """Where the method keeps the prompts that it finds, or the agent that it fine-tunes from a start."""
        folder = self.results / file_name(self.spec) / self.method
        if self.needs.agent == "start":
            return folder / file_name(self.agent.start)
        return folder


async def make_direct(setup: Setup) -> Answer:
    """Ask the environment once."""
    return partial(direct, setup.environment, setup.request)


async def make_cot(setup: Setup) -> Answer:
    """Ask the environment to think step by step, and then to answer."""
    return partial(think_then_answer, setup.environment, setup.request)


async def make_search(setup: Setup, *, algorithm: Algorithm) -> Answer:
    """Ask the environment once, under the prompt that a search has found."""
    settings = SearchSettings(
        setup.method,
        setup.environment,
        setup.open_optimizer(algorithm.optimizer_fields),
        setup.request,
        max_calls=setup.calls,
        examples=setup.examples,
        seed=setup.seed,
    )
    return await optimised_prompt(algorithm, settings, setup.datasets, setup.data, setup.folder)


async def make_trained(setup: Setup) -> Answer:
    """Play games with the trained agent, or with a model that was not trained here; grpo-only in one turn."""
    return play_with(setup.agent, setup)


async def make_untrained(setup: Setup) -> Answer:
    """Play the trained agent's game with the agent as it was before its training."""
    start = find_agent(setup.agent.start, setup.agent.config.seed)
    return play_with(replace(setup.agent, path=start), setup)


async def make_sft(setup: Setup) -> Answer:
    """Fine-tune the agent on gold answers, and play games of one turn."""
    from prompt_r1.evaluation.imitation import sft_agent

    agent = sft_agent(
        setup.agent, setup.data.train, seed=setup.seed, device=str(setup.device), folder=setup.folder
    )
    return play_with(agent, setup, thinks=False)


async def make_bc(setup: Setup) -> Answer:
    """Fine-tune the mini agent on the demonstrations that ended right, and play."""
    from prompt_r1.evaluation.imitation import bc_agent

    agent = bc_agent(setup.agent, seed=setup.seed, device=str(setup.device), folder=setup.folder)
    return play_with(agent, setup)


async def make_rft(setup: Setup) -> Answer:
    """Fine-tune the agent on its own games that ended right, and play."""
    from prompt_r1.evaluation.imitation import rft_agent

    agent = await rft_agent(
        setup.agent,
        setup.environment,
        setup.data.train,
        seed=setup.seed,
        device=setup.device,
        folder=setup.folder,
        calls=setup.calls,
    )
    return play_with(agent, setup)


def play_with(named: NamedAgent, setup: Setup, *, thinks: bool = True) -> Answer:
    """Load an agent. It answers each question by a game."""
    from prompt_r1.evaluation.games import answer_by_games
    from prompt_r1.pair.agent import load_agent

    return answer_by_games(
        load_agent(named.path, named.config, setup.device),
        setup.environment,
        named.config.base_rule,
        setup.sampling,
        is_mute=not setup.needs.environment,
        thinks=thinks,
    )


Comparison = Literal["default", "paper", "transfer"]
"""A comparison that the user does not spell out.

    default     without --method
    paper       --tables
    transfer    --tables, with every environment and every agent (Table 5)
"""


@dataclass(frozen=True)
class Method:
    """A row of METHODS."""

    needs: Needs
    make: Callable[[Setup], Awaitable[Answer]]
    compared: tuple[Comparison, ...] = ("paper",)  # the comparisons that have the method
    algorithm: Algorithm | None = None  # how the method searches for a prompt
    fields: Fields = field(default_factory=dict)  # fields of each request; they win over --env-args


def search_method(algorithm: Algorithm) -> Method:
    """The method that answers under the prompt that an algorithm finds."""
    needs = Needs(training=True, validation=algorithm.scored_by == "validation")
    make = partial(make_search, algorithm=algorithm)
    return Method(needs, make, algorithm=algorithm, fields=algorithm.fields)


METHODS: dict[str, Method] = {
    "direct": Method(Needs(), make_direct, compared=("default", "paper", "transfer")),
    "cot": Method(Needs(), make_cot, fields={"temperature": 0.0}),
    "opro": search_method(OPRO),
    "textgrad": search_method(TEXTGRAD),
    "gepa": search_method(GEPA),
    "sft": Method(Needs(environment=False, agent="start", training=True), make_sft),
    "grpo-only": Method(Needs(environment=False, agent="own"), make_trained),
    "untrained": Method(Needs(agent="start"), make_untrained, compared=("default", "paper")),
    "bc": Method(Needs(agent="start"), make_bc, compared=()),
    "rft": Method(Needs(agent="start", training=True), make_rft, compared=()),
    "agent-only": Method(Needs(environment=False, agent="trained"), make_trained),
    "prompt-r1": Method(Needs(agent="trained"), make_trained, compared=("default", "paper", "transfer")),
}
