"""The games of the rollout benchmark: random lengths, latencies and tokens.

A model with random weights does not end its turns sensibly, so the workload sets the length of each turn.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 8192


@dataclass(frozen=True)
class PlannedTurn:
    """One turn of a game, and the reply to it."""

    new_tokens: int
    reply: list[int]  # tokens; empty after the last turn
    latency: float  # seconds until the reply arrives


@dataclass(frozen=True)
class PlannedGame:
    """The prompt of a game, and its turns."""

    prompt: list[int]
    turns: list[PlannedTurn]


@dataclass(frozen=True)
class Lengths:
    """The distributions of lengths and latencies; ranges include both ends."""

    prompt: int  # tokens
    turns: tuple[int, ...]  # relative frequencies of games with 1, 2, … turns
    new: tuple[int, int]  # tokens of a turn
    reply: tuple[int, int]  # tokens
    latency: float  # median seconds of a reply, log-normally distributed
    sigma: float  # of the logarithm of the latency


LENGTHS = {
    "short": Lengths(400, (1, 2, 3, 4), (60, 200), (100, 300), 0.5, 1.0),
    # Guesses for a large model: the lengths of real games are not published.
    "long": Lengths(600, (1, 1, 1, 1, 1), (120, 320), (200, 400), 2.0, 0.8),
}


def plan(
    questions: int,
    group_size: int,
    *,
    seed: int,
    lengths: Lengths = LENGTHS["short"],
    vocabulary: int = VOCABULARY,
) -> list[PlannedGame]:
    """Games of random tokens; the games of a question share their prompt."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    games = []
    for _ in range(questions):
        prompt = tokens(lengths.prompt)
        for _ in range(group_size):
            (count,) = rng.choices(range(1, len(lengths.turns) + 1), weights=lengths.turns)
            turns = []
            for _ in range(count - 1):
                latency = rng.lognormvariate(math.log(lengths.latency), lengths.sigma)
                turns.append(
                    PlannedTurn(rng.randint(*lengths.new), tokens(rng.randint(*lengths.reply)), latency)
                )
            games.append(PlannedGame(prompt, [*turns, PlannedTurn(rng.randint(*lengths.new), [], 0.0)]))
    return games


def longest(games: list[PlannedGame]) -> int:
    """The number of tokens of the longest game."""
    return max(
        len(game.prompt) + sum(turn.new_tokens + len(turn.reply) for turn in game.turns) for game in games
    )


@dataclass(frozen=True)
class Totals:
    """The work in these games, whatever engine plays them."""

    games: int
    turns: int
    new_tokens: int
    reply_tokens: int
    question_tokens: int  # each question once
    longest_chain: float  # seconds of latency in the game that waits longest

    @property
    def prefill(self) -> int:
        """Prompt tokens if nothing is computed twice.

        These are questions, replies, and for each later turn the last token of the turn before, which was
        sampled but has not gone through the model.
        """
        return self.question_tokens + self.reply_tokens + self.turns - self.games


def totals(games: list[PlannedGame]) -> Totals:
    """Add up the work in these games."""
    turns = [turn for game in games for turn in game.turns]
    return Totals(
        games=len(games),
        turns=len(turns),
        new_tokens=sum(turn.new_tokens for turn in turns),
        reply_tokens=sum(len(turn.reply) for turn in turns),
        question_tokens=sum(len(prompt) for prompt in {tuple(game.prompt) for game in games}),
        longest_chain=max(sum(turn.latency for turn in game.turns) for game in games),
    )


def small_model(*, attention: str, vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """A random Qwen3 of 7 M parameters (with 8,192 tokens).

    The head has large weights, so that greedy decoding has clear winners.
    """
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=768, max_position_embeddings=4096,
        tie_word_embeddings=False, attn_implementation=attention, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).eval()
        torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return model


def large_model(*, attention: str, device: torch.device) -> Qwen3ForCausalLM:
    """A random model of Qwen3-4B's shape in bfloat16."""
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=2560, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=9728, max_position_embeddings=40_960,
        tie_word_embeddings=True, attn_implementation=attention, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


Generate = Callable[[list[int], int], Awaitable[list[int]]]  # tokens, how many new ones → the new ones


async def play_async(games: list[PlannedGame], generate: Generate, *, latency: bool) -> list[list[int]]:
    """Play all games concurrently; returns the sampled tokens of each."""

    async def play(game: PlannedGame) -> list[int]:
        tokens, sampled = list(game.prompt), []
        for turn in game.turns:
            new = await generate(tokens, turn.new_tokens)
            sampled += new
            if latency and turn.reply:
                await asyncio.sleep(turn.latency)
            tokens += new + turn.reply
        return sampled

    return await asyncio.gather(*(play(game) for game in games))
