"""What the benchmarks play and train on: games of random lengths, latencies and tokens, and random models.

A model with random weights does not end its turns sensibly, so the plan sets the length of each turn.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import TokenSequence
from prompt_r1.engine.scheduler import Job, Scheduler
from prompt_r1.grpo import LossColumns, grpo_loss
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.policy import Policy
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.settings.agent import SMOLLM2
from prompt_r1.training.batches import micro_batches_of
from prompt_r1.training.update import UpdateStats, importance_cap_of, optimizer_step
from prompt_r1.types import Completion, Question, Reward, ScoredGame, Trajectory

CPU = torch.device("cpu")
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
    sigma: float  # standard deviation of the latency's logarithm


LENGTHS = {
    "short": Lengths(400, (1, 2, 3, 4), (60, 200), (100, 300), 0.5, 1.0),
    # These lengths are guesses for a large model, because the lengths of real games are not published.
    "long": Lengths(600, (1, 1, 1, 1, 1), (120, 320), (200, 400), 2.0, 0.8),
    "smollm2": Lengths(100, (0, 1), (40, 40), (30, 30), 0.5, 1.0),  # as `--config small`
    "instruction": Lengths(400, (0, 1), (40, 40), (30, 30), 0.5, 1.0),  # "smollm2" with the paper's prompt
    "decode": Lengths(16, (1,), (100, 100), (1, 1), 0.5, 1.0),  # hardly any prompt, and no reply
}


def plan(
    questions: int,
    group_size: int,
    *,
    seed: int,
    lengths: Lengths = LENGTHS["short"],
    vocabulary: int = VOCABULARY,
) -> list[PlannedGame]:
    """Plan games of random tokens. The games of a question share their prompt."""
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
    """The work in some games, which does not depend on the engine."""

    games: int
    turns: int
    new_tokens: int
    prefill: int  # prompt tokens, if each question's prompt is computed only once


def totals(games: list[PlannedGame]) -> Totals:
    """Add up the work in these games."""
    turns = [turn for game in games for turn in game.turns]
    questions = sum(len(prompt) for prompt in {tuple(game.prompt) for game in games})
    # Each later turn also computes the last token of the turn before, which was sampled but not computed.
    prefill = questions + sum(len(turn.reply) for turn in turns) + len(turns) - len(games)
    return Totals(len(games), len(turns), sum(turn.new_tokens for turn in turns), prefill)


SHAPES = {  # hidden, layers, heads, key heads, head size, intermediate
    "small": (256, 4, 4, 2, 64, 768),
    "Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072),
    "Qwen3-4B": (2560, 36, 32, 8, 128, 9728),
}


def random_model(
    name: str = "small",
    *,
    attention: str,
    vocabulary: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Qwen3ForCausalLM:
    """Make a random Qwen3, which is the same each time.

    `vocabulary` 0: VOCABULARY for the small model, else as large as Qwen3's. The small model has 7 M
    parameters. Its head has large weights, so that greedy decoding has clear winners.
    """
    hidden, layers, heads, key_heads, head_size, intermediate = SHAPES[name]
    small = name == "small"
    config = Qwen3Config(  # type: ignore[call-arg]
        vocab_size=vocabulary or (VOCABULARY if small else 151_936), hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        head_dim=head_size, intermediate_size=intermediate, max_position_embeddings=40_960,
        tie_word_embeddings=not small, attn_implementation=attention, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
        if small:
            torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return model


def smollm2(*, attention: str) -> PreTrainedModel:
    """Load SmolLM2-135M-Instruct in float32.

    It has no end token, because the plan sets the length of each turn.
    """
    folder, dtype = resolve_agent(SMOLLM2).make(seed=0), torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def random_games(planned: list[PlannedGame], vocabulary: int) -> list[ScoredGame]:
    """Make games to train on. They have the planned lengths, and random tokens and advantages."""
    rng = random.Random(0)
    games = []
    for number, game in enumerate(planned):
        trajectory = Trajectory(Question("q", "d", "?", ("a",)), stop="answered")
        trajectory.add_context(game.prompt)
        for turn in game.turns:
            new = [rng.randrange(vocabulary) for _ in range(turn.new_tokens)]
            trajectory.add_sampled(Completion(new, [0.0] * len(new), True))
            trajectory.add_context(turn.reply)
        games.append(ScoredGame(trajectory, Reward(0, 0, 0), rng.gauss(0.2, 1), index=number))
    return games


def learn_from(
    games: list[ScoredGame], policy: Policy, optimizer: Optimizer, *, tokens_per_batch: int
) -> dict[str, float]:
    """Take one optimiser step on these games, without a reference. Returns its metrics."""
    ranks = Ranks(0, 1, policy.device)
    batches = micro_batches_of(games, ranks, tokens_per_batch=tokens_per_batch, token_mean=False)
    settings = {"clip": 0.2, "clip_high": 0.0, "kl_coef": 0.0, "importance_cap": importance_cap_of(policy)}
    stats = UpdateStats()
    for batch in batches:
        output = policy(batch.packed)
        columns = LossColumns(
            old=output.logprobs.detach(),
            reference=None,
            engine=batch.engine,
            advantages=batch.advantages,
            weights=batch.weights,
            game=batch.game,
        )
        loss = grpo_loss(output.logprobs, columns, **settings)
        loss.total.backward()
        stats.add(columns, output, loss)
    optimizer_step(policy, optimizer, ranks, stats)
    return stats.metrics(ranks)


Generate = Callable[[list[int], int], Awaitable[list[int]]]
"""Tokens, and the number of new tokens → the new tokens."""


async def play_async(
    games: list[PlannedGame], open_game: Callable[[], AbstractContextManager[Generate]], *, latency: bool
) -> list[list[int]]:
    """Play all games concurrently. Returns the sampled tokens of each game."""

    async def play(game: PlannedGame) -> list[int]:
        tokens, sampled = list(game.prompt), []
        with open_game() as generate:
            for turn in game.turns:
                new = await generate(tokens, turn.new_tokens)
                sampled += new
                if latency and turn.reply:
                    await asyncio.sleep(turn.latency)
                tokens += new + turn.reply
        return sampled

    return await asyncio.gather(*(play(game) for game in games))


@contextmanager
def greedy_game(engine: Engine) -> Iterator[Generate]:
    """Open a game of our engine, for `play_async`."""
    with engine.new_sequence() as game:

        async def generate(tokens: list[int], max_new: int) -> list[int]:
            completion = await engine.generate(
                tokens, max_new=max_new, seed="", sequence=game, temperature=0.0
            )
            return completion.tokens

        yield generate


class CountingScheduler(Scheduler):
    """Counts the prompt tokens that are computed, and the jobs that are preempted."""

    prefilled = 0
    preempted = 0

    def schedule(self) -> dict[Job, int]:
        prefilling = [job for job in self.running if job.is_prefilling]
        counts = super().schedule()
        self.prefilled += sum(counts.get(job, 0) for job in prefilling)
        return counts

    def evict(self, sequences: Collection[TokenSequence]) -> None:
        self.preempted += sum(job.sequence in sequences for job in self.running)
        super().evict(sequences)


def count_work(engine: Engine) -> CountingScheduler:
    """Count what an engine computes from now on."""
    counting = CountingScheduler(engine._pool, engine._limits)
    engine._scheduler = counting
    return counting
