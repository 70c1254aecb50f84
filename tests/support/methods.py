"""Methods on scripted environments, for tests."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.environments.budget import Price
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import Caller, Reply, Source
from prompt_r1.environments.specs import open_account
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.making import ReadyMethod, make_method, open_environment_of
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.evaluation.searches import Data
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent, preset_config
from prompt_r1.types import Message, Question

ANNA = Question("1", "a", "abc def?", ("Anna",))
CONFIG = replace(preset_config("mini"), max_turns=3, max_new=60, max_tokens=900)


class PricedSource(Source):
    """Replies with a function of the messages."""

    parameters: dict[str, object] = {}  # noqa: RUF012
    samples = True

    def __init__(self, reply, tokens_in: int = 10, tokens_out: int = 3, finish: str = "stop") -> None:
        self.name = "priced"
        self.reply_to = reply
        self.finish = finish
        self.tokens = {"tokens_in": tokens_in, "tokens_out": tokens_out}  # the tokens of each call
        self.asked: list[list[Message]] = []
        self.numbers: list[int] = []  # the number of the game of each call

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        self.numbers.append(caller.sample)
        self.asked.append([dict(message) for message in messages])  # type: ignore[misc]
        return Reply(self.reply_to(messages), finish=self.finish, **self.tokens)


def priced(source, journal: Path | None = None) -> Environment:
    """The environment of a source, for 1 dollar per million tokens in and 2 out."""
    return Environment([source], journal=Journal(journal), prices=[Price(1.0, 2.0)])


def method(
    name: str,
    environment: Environment,
    *,
    optimizer: Environment | None = None,
    agent: NamedAgent | Path | str = "",
    folder: Path = Path("unused"),
    questions: Sequence[Question] = (ANNA,),
    train: Sequence[Question] = (),
    validation: Sequence[Question] = (),
    seed: int = 0,
    calls: int = 0,
    examples: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> ReadyMethod:
    """A method with a tiny agent, ready for `questions`; `calls` limits the calls of its preparation.

    Without an `optimizer`, the environment writes the prompts.
    """
    needed = METHODS[name]
    if isinstance(agent, NamedAgent):
        played_by = agent
    else:
        played_by = NamedAgent(str(agent), CONFIG, str(agent), agent if isinstance(agent, Path) else None)
    if needed.agent == "start":
        played_by = played_by.before_training()
    config = EvaluateConfig(
        out=str(folder),
        optimize_calls=calls,
        optimize_examples=examples,
        temperature=temperature,
        top_p=top_p,
        env=("large",),
        device="cpu",
    )
    system = System(name, "large", played_by.name if needed.agent else "")
    evaluation = Evaluation(
        config,
        seed,
        metrics={},
        agents={},
        systems={system: played_by if needed.agent else None},
        environments={"large": config},
        questions=questions,
        data=Data(train, validation),
    )
    if not needed.needs_environment:
        environment = open_environment_of(evaluation, system, open_account(config))
    making = make_method(evaluation, system, environment, optimizer or environment)
    return asyncio.run(making)


def answer(name: str, environment: Environment, **options: object) -> Prediction:
    """A method's answer to one question. With this seed the tiny agent asks; greedily it never does."""
    return asyncio.run(method(name, environment, seed=5, **options)(ANNA, 0))
