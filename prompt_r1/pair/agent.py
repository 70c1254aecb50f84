"""Load an agent, and play one question with it: for training, evaluation and people."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prompt_r1.engine.engine import Engine
from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.budget import Bill
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import Caller
from prompt_r1.errors import QuestionTooLong
from prompt_r1.model.loading import load_policy, load_tokenizer, vocabulary_of
from prompt_r1.model.policy import Policy
from prompt_r1.pair.dialogue import DialogueSplitter, OnPiece
from prompt_r1.protocol import Codec
from prompt_r1.rollout import play
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.types import GameSettings, Message, Question, Trajectory

# In a question that people write, a token has at most this many characters on average.
MAX_MEAN_CHARACTERS_PER_TOKEN = 16


class Agent:
    """An agent that is ready to play: its weights in a policy, its tokenizer in a codec, and its game."""

    def __init__(self, policy: Policy, codec: Codec, game: GameSettings) -> None:
        self.policy = policy
        self.codec = codec
        self.game = game
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine. It is made when the agent first plays, and its cache takes a share of `memory_left`."""
        if self._engine is None:
            self._engine = Engine(self.policy, stop_ids=self.codec.stop_ids, max_tokens=self.game.max_tokens)
        return self._engine

    def close(self) -> None:
        """Free the engine with its KV cache. An agent that plays again makes a new engine."""
        self._engine = None


def load_agent(path: str | Path, config: AgentConfig, device: torch.device) -> Agent:
    """Load the agent of a folder or hub id, ready to play the game of `config`.

    Raises UsageError if there is no agent.
    """
    # bfloat16 is slow on a CPU.
    compute = torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)
    # A tokenizer or chat template that cannot be used is reported before the weights are loaded.
    codec = load_codec(path, config)
    policy = load_policy(
        path,
        device=device,
        compute_dtype=compute,
        weights_dtype=compute,
        temperature=config.temperature,
        vocabulary=vocabulary_of(codec.tokenizer),
        max_tokens=config.max_tokens,
    )
    check_model(policy)
    # The special tokens that the model's generation config lists also end a turn. Ordinary tokens do not,
    # because transformers may list one by mistake if the model has no generation config.
    added_tokens = codec.tokenizer.added_tokens_decoder
    special = {token for token, added in added_tokens.items() if added.special}
    codec.stop_ids |= policy.end_ids & special
    return Agent(policy, codec, config.game)


def load_codec(path: str | Path, config: AgentConfig) -> Codec:
    """Load the codec of an agent without its model, to check the tokenizer or to count tokens.

    The model may have more stop tokens, which `load_agent` adds.
    """
    return Codec(load_tokenizer(path), config.instruction_text)


def check_question_lengths(questions: Iterable[Question], codec: Codec, game: GameSettings) -> None:
    """Raise QuestionTooLong for a question that leaves the agent no room to write."""
    for question in questions:
        check_question_length(question.text, codec, game, name=f"question {question.id!r}")


def check_question_length(text: str, codec: Codec, game: GameSettings, *, name: str = "the question") -> None:
    """Raise QuestionTooLong for a text that leaves the agent no room to write; the error calls it `name`."""
    limit = game.max_tokens
    # Megabytes take many seconds to encode, so they are refused before they are encoded.
    if len(text) > limit * MAX_MEAN_CHARACTERS_PER_TOKEN:
        excess = f"has {len(text):,} characters, more than a game of {limit} tokens holds"
    else:
        length = len(codec.opening(text))
        if length < limit:
            return
        excess = f"takes {length} tokens of a game of {limit}"
    raise QuestionTooLong(
        f"{name} ({text[:40]!r}…) {excess}: shorten it, or train with a larger --max-tokens"
    )


@dataclass(frozen=True)
class Sampling:
    """How the agent's tokens are sampled."""

    seed: str
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0


async def play_question(
    agent: Agent,
    environment: Environment,
    question: Question,
    sampling: Sampling,
    *,
    sample: int = 0,
    epoch: int = 0,
    bill: Bill | None = None,
    on_piece: OnPiece | None = None,
) -> Trajectory:
    """Play one game of a question, for training, evaluation and people. Many games may run at once.

    `sample` (the game in its group) and `epoch` (from 0) identify the game: an environment that samples its
    replies gives each game a reply of its own. The calls are added to `bill`, which may have a limit:
    LimitReached is raised before a request that may exceed it.
    """
    begin = time.perf_counter()
    caller = Caller(question.id, sample, epoch)
    bill = bill or Bill()
    splitter = None if on_piece is None else DialogueSplitter(agent.codec.turn_text, on_piece)

    async def ask(messages: list[Message]) -> str:
        reply = await environment.ask(messages, caller, bill)
        if splitter is not None:
            splitter.add_reply(reply.text)
        return reply.text

    with agent.engine.new_sequence() as sequence:
        generate = partial(
            agent.engine.generate,
            sequence=sequence,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            watch=None if splitter is None else splitter.add_token,
        )
        trajectory = await play(question, generate, ask, agent.codec, agent.game, seed=sampling.seed)
    if splitter is not None:
        splitter.end_turn()
    trajectory.spent = bill.spent
    trajectory.charged = bill.charged
    trajectory.seconds = time.perf_counter() - begin
    return trajectory
