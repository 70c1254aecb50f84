"""An agent: weights, engine, codec and rules."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prompt_r1.engine.engine import Engine
from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.errors import QuestionTooLong
from prompt_r1.model.loading import check_vocabulary, load_policy, load_tokenizer
from prompt_r1.model.policy import Policy
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.settings.agent import MINI_AGENT, AgentConfig
from prompt_r1.types import GameSettings, Question, Trajectory


@dataclass(frozen=True)
class Agent:
    """An agent that is ready to play."""

    engine: Engine
    codec: Codec
    game: GameSettings

    @property
    def policy(self) -> Policy:
        """Its weights."""
        return self.engine.policy


def load_agent(path: str | Path, config: AgentConfig, device: torch.device) -> Agent:
    """Load the agent of a folder or hub id, ready to play the game of `config`.

    With a mini agent, torch computes in one thread from now on: more hardly help a tiny model, and hurt on a
    busy CPU. Raises UsageError if there is no agent.
    """
    if config.agent == MINI_AGENT:
        torch.set_num_threads(1)
    # bfloat16 is slow on a CPU.
    compute = torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)
    codec = load_codec(path, config)
    policy = load_policy(
        path,
        device=device,
        compute=compute,
        weights=compute,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
    )
    check_model(policy)
    check_vocabulary(policy, codec.tokenizer)
    # Turns end at any end token of the model, not only at those of the tokenizer. Where a model has no
    # generation config, transformers takes a number that may be that of an ordinary token.
    added = codec.tokenizer.added_tokens_decoder
    codec.stop_ids |= {end for end in policy.end_ids if end in added and added[end].special}
    engine = Engine(policy, stop_ids=codec.stop_ids, max_tokens=config.max_tokens)
    return Agent(engine, codec, config.game)


def load_codec(path: str | Path, config: AgentConfig) -> Codec:
    """The codec of the tokenizer of a folder or hub id."""
    return Codec(load_tokenizer(path), INSTRUCTIONS[config.instruction])


def check_question_lengths(questions: Iterable[Question], codec: Codec, game: GameSettings) -> None:
    """Raise QuestionTooLong for a question that leaves the agent no room to write."""
    for question in questions:
        length = len(codec.opening(question.text))
        if length >= game.max_tokens:
            has_name = question.id not in ("", question.text)
            name = f"question {question.id!r}" if has_name else "the question"
            raise QuestionTooLong(
                f"{name} ({question.text[:40]!r}…) takes {length} tokens of a game of {game.max_tokens}: "
                "shorten it, or train with a larger --max-tokens"
            )


async def play_question(
    agent: Agent,
    environment: Environment,
    question: Question,
    *,
    seed: str,
    temperature: float = 0.0,
    top_p: float = 1.0,
    sample: int = 0,
    epoch: int = 0,
) -> Trajectory:
    """Play a question with an agent's engine; many may run at once. The result holds time and spending.

    `sample` is the number of the game among those of the question. Where the environment samples, equal
    messages of two games, or in two epochs, are two calls.
    """
    caller, begin = Caller(question.id, sample, epoch), time.perf_counter()
    ask = partial(environment.ask, caller=caller)
    with agent.engine.new_game() as handle:
        generate = partial(agent.engine.generate, game=handle, temperature=temperature, top_p=top_p)
        trajectory = await play(question, generate, ask, agent.codec, agent.game, seed=seed)
    trajectory.spent, trajectory.seconds = caller.spent, time.perf_counter() - begin
    return trajectory
