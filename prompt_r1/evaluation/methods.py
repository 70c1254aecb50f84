"""The methods of a comparison: what each method needs, and how it is made.

To make a method means to make a function (`Answer`) that predicts the answer to a question. This file does
not import torch, so that a wrong command line is reported at once.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import Answer, direct, think_then_answer
from prompt_r1.evaluation.gepa import gepa
from prompt_r1.evaluation.opro import opro
from prompt_r1.evaluation.searches import Algorithm, PromptSearch, file_name, optimised_prompt
from prompt_r1.evaluation.textgrad import textgrad
from prompt_r1.pair.asking import request_of
from prompt_r1.pair.named_agent import NamedAgent, find_agent
from prompt_r1.types import Question

if TYPE_CHECKING:
    import torch

Fields = Mapping[str, object]
"""Fields of a request to an endpoint."""


@dataclass(frozen=True)
class Needs:
    """What a method needs to answer."""

    environment: bool = True
    agent: Literal["", "trained", "start", "own"] = ""  # start: before the training; own: --grpo-agent
    training: bool = False  # whether training questions prepare the method
    validation: bool = False  # whether validation questions select what was prepared
    optimizer: bool = False  # whether the method needs a model that writes prompts


@dataclass(frozen=True)
class Setup:
    """What a method is made from. Each method uses the parts that it needs."""

    method: str
    spec: str  # the environment's SPEC. Without an environment, the SPEC of the agent's training.
    environment: Environment | None  # None: the method does not need an environment.
    open_optimizer: Callable[[Fields], Environment]  # opens the model that writes prompts
    agent: NamedAgent  # --agent or --grpo-agent names it; trained here or not
    datasets: Sequence[str]  # the datasets of the questions that will be answered
    train: Sequence[Question]
    validation: Sequence[Question]
    results: Path  # the folder of the evaluation
    device: "torch.device"
    seed: int  # the seed of the preparation and of games
    temperature: float  # the temperature and top-p of the agent's sampling
    top_p: float
    calls: int = 0  # the limit of calls of a search or of rft; 0: the authors' number
    examples: int = 0  # how many questions score a prompt; 0: the authors' number

    @property
    def needed_environment(self) -> Environment:
        """The environment, for a method that needs one."""
        assert self.environment is not None, f"{self.method} needs an environment"
        return self.environment

    @property
    def request(self) -> str:
        """How the answer is requested."""
        return request_of(self.spec)

    @property
    def folder(self) -> Path:
        """Where the method keeps the prompts that it finds, or the agent that it fine-tunes from a start."""
        folder = self.results / file_name(self.spec) / self.method
        if METHODS[self.method].needs.agent == "start":
            folder /= file_name(self.agent.start)
        return folder


async def make_direct(setup: Setup) -> Answer:
    """Ask the environment once."""
    return partial(direct, setup.needed_environment, setup.request)


async def make_cot(setup: Setup) -> Answer:
    """Ask the environment to think step by step, and then to answer."""
    return partial(think_then_answer, setup.needed_environment, setup.request)


async def make_search(setup: Setup, *, algorithm: Algorithm, optimizer_fields: Fields) -> Answer:
    """Ask the environment once, under the prompt that a search has found."""
    search = PromptSearch(
        setup.method,
        setup.needed_environment,
        setup.open_optimizer(optimizer_fields),
        setup.request,
        max_calls=setup.calls,
        examples=setup.examples,
        seed=setup.seed,
    )
    return await optimised_prompt(
        algorithm, search, setup.datasets, setup.folder, setup.train, setup.validation
    )


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
        setup.agent, setup.train, seed=setup.seed, device=str(setup.device), folder=setup.folder
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
        setup.needed_environment,
        setup.train,
        seed=setup.seed,
        device=setup.device,
        folder=setup.folder,
        calls=setup.calls,
    )
    return play_with(agent, setup)


def play_with(named: NamedAgent, setup: Setup, *, thinks: bool = True) -> Answer:
    """Load an agent. It answers each question by a game."""
    from prompt_r1.evaluation.games import AgentMethod
    from prompt_r1.pair.agent import load_agent

    return AgentMethod(
        load_agent(named.path, named.config, setup.device),
        setup.environment,
        named.config.base_rule,
        temperature=setup.temperature,
        top_p=setup.top_p,
        seed=setup.seed,
        thinks=thinks,
    )


@dataclass(frozen=True)
class Method:
    """A row of METHODS."""

    needs: Needs
    make: Callable[[Setup], Awaitable[Answer]]
    by_default: bool = False  # whether it is compared if there is no --method
    in_paper: bool = True  # whether --tables compares it
    in_transfer: bool = False  # whether --tables compares it with every environment and agent (Table 5)
    fields: Fields = field(default_factory=dict)  # fields of each request; they win over --env-args


SEARCH = Needs(training=True, optimizer=True)
VALIDATED_SEARCH = Needs(training=True, validation=True, optimizer=True)
# The searches send these fields to the model that writes prompts.
OPRO_WRITER: Fields = {"temperature": 1.0, "max_tokens": 512}
TEXTGRAD_WRITER: Fields = {"temperature": 0.0, "max_tokens": 2000}

# The `fields` of a method come from its authors' code or paper.
METHODS: dict[str, Method] = {
    "direct": Method(Needs(), make_direct, by_default=True, in_transfer=True),
    "cot": Method(Needs(), make_cot, fields={"temperature": 0.0}),
    "opro": Method(
        SEARCH,
        partial(make_search, algorithm=opro, optimizer_fields=OPRO_WRITER),
        fields={"temperature": 0.0, "max_tokens": 1024},
    ),
    "textgrad": Method(
        VALIDATED_SEARCH,
        partial(make_search, algorithm=textgrad, optimizer_fields=TEXTGRAD_WRITER),
        fields={"temperature": 0.0, "max_tokens": 2000},
    ),
    "gepa": Method(VALIDATED_SEARCH, partial(make_search, algorithm=gepa, optimizer_fields={})),
    "sft": Method(Needs(environment=False, agent="start", training=True), make_sft),
    "grpo-only": Method(Needs(environment=False, agent="own"), make_trained),
    "untrained": Method(Needs(agent="start"), make_untrained, by_default=True),
    "bc": Method(Needs(agent="start"), make_bc, in_paper=False),
    "rft": Method(Needs(agent="start", training=True), make_rft, in_paper=False),
    "agent-only": Method(Needs(environment=False, agent="trained"), make_trained),
    "prompt-r1": Method(Needs(agent="trained"), make_trained, by_default=True, in_transfer=True),
}
