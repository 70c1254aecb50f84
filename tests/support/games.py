"""Makes games without an engine, from random tokens or from given turns."""

import math
import random
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prompt_r1.engine.engine import Engine
from prompt_r1.grpo import LossColumns, compare_games
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.packing import Packed, pack
from prompt_r1.model.policy import Policy, PolicyOutput
from prompt_r1.protocol import parse
from prompt_r1.reward import OwnReward, Rule, score_games
from prompt_r1.spending import Spending
from prompt_r1.training.batches import Batch, micro_batches_of
from prompt_r1.training.loss_function import loss_of_run
from prompt_r1.training.update import GAP, GapLimit, UpdateStats, importance_cap_of
from prompt_r1.types import Completion, Question, Reward, ScoredGame, Trajectory, Turn
from tests.support import tiny
from tests.support.at_once import at_once
from tests.support.tiny import think
from train import train

CPU = torch.device("cpu")
ONE_RANK = Ranks(rank=0, count=1, device=CPU)
ANY_GAP = GapLimit(GAP, math.inf, math.inf)
SETTINGS: dict[str, Any] = {
    "clip": 0.2,
    "clip_high": 0.0,
    "kl_coef": 0.01,
    "token_mean": False,
    "tokens_per_batch": 64,
    "loss_function": "",
}

ANNA = Question("q", "test", "?", ("Anna Keller",))
GOOD = think("hm", prompt="who?")
RIGHT = think("so", answer="Anna Keller")
HALF = think("so", answer="Anna")  # F1 = 2/3
WRONG = think("so", answer="Bob")


def game_of_turns(*texts: str, stop="answered") -> Trajectory:
    """A game with these turns of the agent, of which the last gets no reply; it has no tokens."""
    replies = ["r"] * (len(texts) - 1) + [None]
    turns = [Turn(text, parse(text), reply) for text, reply in zip(texts, replies, strict=False)]
    calls = len(texts) if stop == "env_error" else len(texts) - 1
    return Trajectory(ANNA, turns=turns, stop=stop, spent=Spending(calls=calls))


def random_game(seed: int, *, stop="answered") -> Trajectory:
    """A game of random tokens: context, agent, context, agent. Games 3n to 3n + 2 share their opening."""
    rng = random.Random(seed)
    trajectory = Trajectory(Question("q", "d", "?", ("a",)), stop=stop)
    trajectory.add_context(tiny.random_tokens(7, seed=seed // 3))
    for turn in range(2):
        if turn:
            trajectory.add_context(tiny.random_tokens(rng.randint(3, 12), seed=seed + turn))
        sampled = tiny.random_tokens(rng.randint(1, 9), seed=100 + seed + turn)
        trajectory.add_sampled(Completion(sampled, [rng.uniform(-3, -0.1) for _ in sampled], True))
    return trajectory


def random_scored_games(count: int = 6) -> list[ScoredGame]:
    """Random games with random advantages."""
    return [
        ScoredGame(random_game(n), Reward(1, 0, 0), random.Random(n).uniform(-2, 2), index=n)
        for n in range(count)
    ]


def naive_logprobs(model, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """(N,) float64 log-probabilities of the agent's tokens of one game, from the logits of all its tokens."""
    tokens = torch.tensor(trajectory.tokens)
    log_p = torch.log_softmax(tiny.logits_of(model, tokens[None])[0, :-1].double() / temperature, -1)
    return log_p.gather(1, tokens[1:, None])[torch.tensor(trajectory.sampled[1:]), 0]


def record_logprobs_of(policy: Policy, games: list[ScoredGame]) -> list[ScoredGame]:
    """Record the policy's log-probabilities in the games, as the engine would."""
    for game in games:
        trajectory = game.trajectory
        with torch.no_grad():
            logprobs = iter(policy(pack([[trajectory]], CPU)).logprobs.tolist())
        trajectory.logprobs = [next(logprobs) if own else 0.0 for own in trajectory.sampled]
    return games


def change_logprobs(games: list[ScoredGame], *, seed: int) -> None:
    """Move the recorded log-probabilities by up to 0.4 nats, as if older weights had sampled the games."""
    rng = random.Random(seed)
    for game in games:
        trajectory = game.trajectory
        for position, sampled in enumerate(trajectory.sampled):
            if sampled:
                trajectory.logprobs[position] += rng.uniform(-0.4, 0.4)


def siblings(seed: int, count: int) -> list[Trajectory]:
    """Games of one question: a common opening, then random turns and replies."""
    rng = random.Random(seed)
    opening = tiny.random_tokens(rng.randint(3, 12), seed=seed)
    return [_continue_opening(opening, seed=100 * seed + number) for number in range(count)]


def _continue_opening(opening: list[int], *, seed: int) -> Trajectory:
    """A game of one to three random turns after an opening."""
    rng = random.Random(seed)
    game = Trajectory(Question("q", "d", "?", ("a",)), stop="answered")
    game.add_context(opening)
    for turn in range(rng.randint(1, 3)):
        if turn:
            game.add_context(tiny.random_tokens(rng.randint(1, 9), seed=200 + seed + turn))
        new = tiny.random_tokens(rng.randint(1, 9), seed=300 + seed + turn)
        game.add_sampled(Completion(new, [rng.uniform(-3, -0.1) for _ in new], True))
    return game


def small_games() -> list[Trajectory]:
    """Games in the vocabulary of the models of `tiny.save_model`, without special tokens."""
    for game in (games := siblings(0, 3)):
        game.tokens = [3 + token % 96 for token in game.tokens]
    return games


def play_with(engine: Engine, openings: list[list[int]], *, turns: int = 2, **how: Any) -> list[Trajectory]:
    """Games, all at once; a reply has some tokens of the opening. `how` is sampled."""

    async def play(number: int) -> Trajectory:
        game = Trajectory(Question("q", "d", "?", ("a",)), stop="answered")
        with engine.new_sequence() as handle:
            for turn in range(turns):
                game.add_context(openings[number][number * turn :])
                seed = f"{number}/{turn}"
                game.add_sampled(await engine.generate(game.tokens, seed=seed, sequence=handle, **how))
        return game

    return at_once(map(play, range(len(openings))))


class Learner:
    """A run of train.py's loop, and its record, whose games are given: by default any policy played them."""

    def __init__(
        self,
        policy: Policy,
        *,
        reference: Callable[[Packed], PolicyOutput] | None = None,
        ranks: Ranks = ONE_RANK,
        lr: float = 1e-3,
        gap_limit: GapLimit = ANY_GAP,
        **settings: Any,
    ) -> None:
        """`settings` are those of SETTINGS that have other values here."""
        chosen = SETTINGS | settings
        assert len(chosen) == len(SETTINGS), f"unknown settings among {settings}"
        self.config = SimpleNamespace(**chosen, group_size=0, advantage="standardised", base_rule=None)
        self.policy, self.ranks, self.reference = policy, ranks, reference
        self.own_reward = self.own_advantages = None
        self.loss_function = loss_of_run(self.config, None, importance_cap=importance_cap_of(policy))
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
        self.gap_limit = gap_limit
        self.questions = SimpleNamespace(of_rank=lambda step, ranks: {})
        self.log = SimpleNamespace(phase=lambda name: nullcontext())
        self.checkpoint_on_user_error = nullcontext
        self.games: list[list[ScoredGame]] = []
        self.stats = UpdateStats()

    def remaining_steps(self) -> range:
        return range(1, 2)

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> list[list[Trajectory]]:
        work.close()
        return []

    def mini_batches(self, games_PG: list[list[ScoredGame]]) -> list[list[Batch]]:
        assert games_PG == [], "the games of a learner are given"
        return [self.micro_batches(games) for games in self.games if games]

    @torch.no_grad()
    def reference_logprobs(self, packed: Packed) -> Tensor | None:
        return None if self.reference is None else self.reference(packed).logprobs

    def refresh(self) -> None:
        """No engine plays."""

    def write_down(self, step: int, games_PG: list[list[ScoredGame]], stats: UpdateStats) -> None:
        self.stats = stats

    def learn(self, mini_batches: list[list[ScoredGame]]) -> dict[str, float]:
        """Take an optimiser step on each mini-batch, in one training step; the metrics."""
        self.games = mini_batches
        train(self, record=self)
        return self.stats.metrics(self.ranks)

    def micro_batches(self, games: list[ScoredGame]) -> list[Batch]:
        """This rank's micro-batches of an optimiser step."""
        return micro_batches_of(
            games,
            self.ranks,
            tokens_per_batch=self.config.tokens_per_batch,
            token_mean=self.config.token_mean,
        )


def columns_of(batch: Batch, *, old: Tensor, reference: Tensor | None = None) -> LossColumns:
    """The columns of the loss of a micro-batch, as train.py makes them."""
    return LossColumns(
        old=old,
        reference=reference,
        engine=batch.engine,
        advantages=batch.advantages,
        weights=batch.weights,
        game=batch.game,
    )


def score_and_compare(
    trajectories_PG: list[list[Trajectory]], rule: Rule, own: OwnReward | None = None
) -> list[list[ScoredGame]]:
    """The games with rewards and advantages, on one rank."""
    rewards_PG = [score_games(group, rule=rule, own=own) for group in trajectories_PG]
    return compare_games(trajectories_PG, rewards_PG, numbers=range(len(rewards_PG)))
