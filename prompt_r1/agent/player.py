"""Who plays, where and on what: agents, environments and question sets, by the names that a user writes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agent.engine import Engine
from prompt_r1.agent.names import KnownAgent
from prompt_r1.agent.policy import Policy, load_policy, load_tokenizer
from prompt_r1.agent.remote import ServedAgent, served_parts
from prompt_r1.config.train import TrainConfig
from prompt_r1.errors import UsageError
from prompt_r1.protocol import ACTION_ENDS, ALONE, INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Environment, Question, Trajectory


@dataclass(frozen=True)
class Player:
    """An agent that is ready to play: its engine, in this process or behind an endpoint, and its codec."""

    engine: Engine | ServedAgent
    codec: Codec

    @property
    def policy(self) -> Policy:
        """The weights that play, of an agent in this process."""
        assert isinstance(self.engine, Engine)
        return self.engine.policy

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        config: TrainConfig,
        temperature: float,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """One turn of a game; `watch` is called with each token as it is sampled in this process."""
        stop = ACTION_ENDS if config.stop_tags else ()
        generate = self.engine.generate
        if isinstance(self.engine, Engine):
            generate = partial(self.engine.generate, watch=watch)
        return await generate(tokens, max_new=max_new, seed=seed, temperature=temperature, stop=stop)

    async def play(
        self,
        question: Question,
        seed: str,
        sample: int = 0,
        *,
        environment: Environment,
        config: TrainConfig,
        temperature: float,
    ) -> Trajectory:
        """One game with the settings it was trained with; `sample` is its number in its group."""
        generate = partial(self.generate, config=config, temperature=temperature)
        ask = partial(environment.ask, sample=sample, session=question.id)
        return await play(question, generate, ask, self.codec, max_turns=config.max_turns,
                          max_tokens=config.max_tokens, max_new=config.max_new, seed=seed,
                          max_reply=config.max_reply_tokens, force_answer=config.force_answer)  # fmt: skip

    def forget(self) -> None:
        """Drop what was computed with weights that are others now."""
        if isinstance(self.engine, Engine):
            self.engine.forget()

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if isinstance(self.engine, ServedAgent):
            await self.engine.close()


def make_player(policy: Policy, codec: Codec, config: TrainConfig) -> Player:
    """Give a policy an engine for games of `config`."""
    engine = Engine(policy, stop_ids=codec.stop_ids, max_tokens=config.max_tokens,
                    kv_tokens=config.kv_tokens, decode=codec.decode)  # fmt: skip
    return Player(engine, codec)


def load_player(
    path: str | Path, config: TrainConfig, device: torch.device, *, weights: torch.dtype | None = None
) -> Player:
    """An agent from its folder or hub id, to play the game of `config`, its weights in the compute dtype or
    in `weights`. Raises UsageError where it cannot."""
    codec = Codec(load_tokenizer(path), (INSTRUCTIONS | ALONE)[config.instruction])
    compute = compute_dtype(config, device)
    policy = load_policy(
        path, device=device, compute=compute, weights=weights or compute, temperature=config.temperature
    )
    return make_player(policy, codec, config)


def codec_of(known: KnownAgent) -> Codec:
    """The codec of an agent's tokenizer and game."""
    instruction = (INSTRUCTIONS | ALONE)[known.game.instruction]
    return Codec(load_tokenizer(known.tokenizer or known.path), instruction)


def load_known(known: KnownAgent, device: torch.device) -> Player:
    """The agent that a user named, ready to play its game."""
    served = served_parts(str(known.path))
    if served is None:
        return load_player(known.path, known.game, device)
    codec = codec_of(known)
    return Player(ServedAgent(*served, codec, prompts=known.prompts), codec)


async def check_served(known: KnownAgent) -> None:
    """Raise UsageError or FatalEnvError for a served agent that plainly cannot play."""
    served = served_parts(str(known.path))
    if served is None:
        return
    agent = ServedAgent(*served, codec_of(known), prompts=known.prompts)
    try:
        await agent.check()
    finally:
        await agent.close()


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: what the config says; float32 on a CPU, where bfloat16 is slow."""
    return torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)


def check_fit(questions: Iterable[Question], codec: Codec, max_tokens: int) -> None:
    """Raise UsageError for a question that leaves the agent no room to write."""
    for question in questions:
        length = len(codec.opening(question.text))
        if length >= max_tokens:
            raise UsageError(f"question {question.id!r} takes {length} tokens of a game of {max_tokens}: "
                             "shorten it, or train with a larger --max-tokens")  # fmt: skip
