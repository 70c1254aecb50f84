"""Load an agent, and play one question with it: for training, evaluation and people."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from prompt_r1.engine.engine import Engine
from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.errors import QuestionTooLong
from prompt_r1.model.loading import load_policy, load_tokenizer, vocabulary_of
from prompt_r1.model.policy import Policy
from prompt_r1.protocol import Codec
from prompt_r1.rollout import play
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.types import GameSettings, Message, Question, Trajectory

# In a question that people write, a token has at most this many characters on average.
MAX_MEAN_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True)
class Agent:
    """An agent that is ready to play: its weights in a policy, its tokenizer in a codec, and its rules."""

    policy: Policy
    codec: Codec
    game: GameSettings

    @cached_property
    def engine(self) -> Engine:
        """The engine, which is made when the agent first plays.

        Its KV cache takes a share of the memory that is free then. In a training the optimiser's states and
        the peak of an update are in memory by that time.
        """
        return Engine(self.policy, stop_ids=self.codec.stop_ids, max_tokens=self.game.max_tokens)


def load_agent(path: str | Path, config: AgentConfig, device: torch.device) -> Agent:
    """Load the agent of a folder or hub id, ready to play the game of `config`.

    Raises UsageError if there is no agent. From now on torch computes in `config.threads` threads, if given.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    # bfloat16 is slow on a CPU.
    compute = torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)
    codec = load_codec(path, config)
    policy = load_policy(
        path,
        device=device,
        compute_dtype=compute,
        weights=compute,
        temperature=config.temperature,
        vocabulary=vocabulary_of(codec.tokenizer),
        max_tokens=config.max_tokens,
    )
    check_model(policy)
    # The model's generation config may list more end tokens than the tokenizer. A turn ends at them too, but
    # only at special tokens: without a generation config, transformers may list an ordinary token.
    added = codec.tokenizer.added_tokens_decoder
    codec.stop_ids |= {end for end in policy.end_ids if end in added and added[end].special}
    return Agent(policy, codec, config.game)


def load_codec(path: str | Path, config: AgentConfig) -> Codec:
    """Load the codec of an agent: the tokenizer of a folder or hub id, and the instruction of `config`."""
    return Codec(load_tokenizer(path), config.instruction_text)


def check_question_lengths(questions: Iterable[Question], codec: Codec, game: GameSettings) -> None:
    """Raise QuestionTooLong for a question that leaves the agent no room to write."""
    for question in questions:
        excess = _excess(question.text, codec, game.max_tokens)
        if excess:
            has_name = question.id not in ("", question.text)
            name = f"question {question.id!r}" if has_name else "the question"
            raise QuestionTooLong(
                f"{name} ({question.text[:40]!r}…) {excess}: shorten it, or train with a larger --max-tokens"
            )


def _excess(question: str, codec: Codec, max_tokens: int) -> str:
    """Why a question leaves no room in a game of `max_tokens`; "" if the agent has room to write."""
    # Megabytes take many seconds to encode, so they are refused before they are encoded.
    if len(question) > max_tokens * MAX_MEAN_CHARACTERS_PER_TOKEN:
        return f"has {len(question):,} characters, more than a game of {max_tokens} tokens holds"
    length = len(codec.opening(question))
    return f"takes {length} tokens of a game of {max_tokens}" if length >= max_tokens else ""


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
    max_turns: int | None = None,
    max_usd: float = math.inf,
    on_token: Callable[[int], None] | None = None,
    on_reply: Callable[[str], None] | None = None,
) -> Trajectory:
    """Play one game of a question, for training, evaluation and people. Many games may run at once.

    `sample` (the game in its group) and `epoch` (from 0) identify the game: an environment that samples its
    replies gives each game a reply of its own. `max_turns` can only lower the agent's own limit. LimitReached
    is raised before a request that may take the costs of the calls above `max_usd`.

    `on_token` gets each token of the agent when it is sampled, and `on_reply` each reply.
    """
    begin = time.perf_counter()
    caller = Caller(question.id, sample, epoch, max_usd=max_usd)

    async def ask(messages: list[Message]) -> str:
        reply = await environment.ask(messages, caller)
        if on_reply is not None:
            on_reply(reply)
        return reply

    rules = agent.game
    if max_turns is not None:
        rules = replace(rules, max_turns=min(max_turns, rules.max_turns))
    with agent.engine.new_sequence() as sequence:
        generate = partial(
            agent.engine.generate, sequence=sequence, temperature=temperature, top_p=top_p, watch=on_token
        )
        trajectory = await play(question, generate, ask, agent.codec, rules, seed=seed)
    trajectory.spent = caller.spent
    trajectory.seconds = time.perf_counter() - begin
    return trajectory
