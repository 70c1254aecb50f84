"""The losses of examples/losses.py, and their gradients, against a loop over tokens in Python floats."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from examples import losses
from prompt_r1.grpo import LossColumns
from prompt_r1.model.distributed import Ranks
from prompt_r1.training.batches import micro_batches_of
from prompt_r1.types import ScoredGame
from tests.support.games import CPU, columns_of, random_scored_games

CLIP, CLIP_HIGH, KL_COEF = 0.05, 0.3, 0.1
# Amplitude and frequency of the changes of the old, the new and the reference log-probabilities.
SHIFTS = ((0.6, 40), (1.0, 50), (0.5, 60))


@dataclass
class Token:
    """A token of a game, in Python floats, with the derivative of the loss by its log-probability."""

    engine: float
    old: float
    new: float
    reference: float
    advantage: float
    derivative: float = 0.0


def shifted(engine: float) -> list[float]:
    """The old, the new and the reference log-probability of a token, from the engine's."""
    return [engine + shift * math.sin(frequency * engine) for shift, frequency in SHIFTS]


def tokens_of(game: ScoredGame) -> list[Token]:
    """The agent's tokens of a game. The log-probabilities are those of the batches, which are in float32."""
    sampled = game.trajectory.sampled
    tokens: list[Token] = []
    turn = -1
    for position, logprob in enumerate(game.trajectory.logprobs):
        if sampled[position]:
            turn += not sampled[position - 1]
            engine = torch.tensor(logprob).item()
            advantage = game.turn_advantages[turn] if game.turn_advantages else game.advantage
            tokens.append(Token(engine, *shifted(engine), advantage))
    return tokens


def clipped(ratio: float, advantage: float) -> tuple[float, float]:
    """The clipped surrogate, and its derivative by the logarithm of the ratio."""
    unclipped = ratio * advantage
    limited = min(max(ratio, 1 - CLIP), 1 + CLIP_HIGH) * advantage
    return (unclipped, unclipped) if unclipped <= limited else (limited, 0.0)


# For each loss, the surrogate of a token and its derivative by the token's log-probability (for GSPO, by the
# mean of the game's). `log_ratio` is that of the game for GSPO, else of the token.
def first_version(token: Token, log_ratio: float) -> tuple[float, float]:
    return token.advantage * token.new, token.advantage


def clipped_surrogate(token: Token, log_ratio: float) -> tuple[float, float]:
    return clipped(math.exp(log_ratio), token.advantage)


def dual_clip(token: Token, log_ratio: float) -> tuple[float, float]:
    value, derivative = clipped(math.exp(log_ratio), token.advantage)
    lowest = losses.DUAL_CLIP * token.advantage
    return (lowest, 0.0) if token.advantage < 0 and value < lowest else (value, derivative)


def cispo(token: Token, log_ratio: float) -> tuple[float, float]:
    weight = min(math.exp(log_ratio), 1 + CLIP_HIGH) * token.advantage
    return weight * token.new, weight


SURROGATES: dict[str, Callable[[Token, float], tuple[float, float]]] = {
    "first_version": first_version,
    "dr_grpo": clipped_surrogate,
    "dual_clip": dual_clip,
    "gspo": clipped_surrogate,
    "cispo": cispo,
}


def loss_in_a_loop(name: str, games: list[list[Token]], *, cap: float, token_mean: bool) -> float:
    """The loss of these games. Writes its derivatives into the tokens."""
    total = 0.0
    for game in games:
        mean_log_ratio = sum(token.new - token.old for token in game) / len(game)
        if name == "dr_grpo":
            weight = 1 / (len(games) * losses.MAX_TOKENS)
        elif token_mean:
            weight = 1 / sum(map(len, games))
        else:
            weight = 1 / (len(games) * len(game))
        for token in game:
            log_ratio = mean_log_ratio if name == "gspo" else token.new - token.old
            surrogate, derivative = SURROGATES[name](token, log_ratio)
            importance = min(math.exp(token.old - token.engine), cap) if cap else 1.0
            difference = token.reference - token.new
            total += weight * (-importance * surrogate + KL_COEF * (math.exp(difference) - difference - 1))
            token.derivative += weight * KL_COEF * (1 - math.exp(difference))
            if name == "gspo":
                for other in game:
                    other.derivative -= weight * importance * derivative / len(game)
            else:
                token.derivative -= weight * importance * derivative
    return total


def some_games() -> list[ScoredGame]:
    """Games of which some have an advantage for each of their two turns, and others one advantage."""
    games = random_scored_games(7)
    for number in (1, 5):
        games[number] = replace(games[number], turn_advantages=(0.7, -1.3))
    return games


@pytest.mark.parametrize(("ranks", "tokens_per_batch"), [(1, 1), (1, 60), (1, 10_000), (2, 60), (3, 10_000)])
@pytest.mark.parametrize(
    ("name", "cap", "token_mean"),
    [
        *((name, 0.0, False) for name in SURROGATES),
        ("dr_grpo", 1.2, False),  # its weights are those of a sequence mean
        *((name, 1.2, True) for name in SURROGATES if name != "dr_grpo"),
    ],
)
def test_a_loss_and_its_gradient_equal_a_loop(name, cap, token_mean, ranks, tokens_per_batch):
    """Summed over the micro-batches of all ranks, however the games are packed."""
    games = some_games()
    settings = {"clip": CLIP, "clip_high": CLIP_HIGH, "kl_coef": KL_COEF, "importance_cap": cap}
    if name == "first_version":
        settings = {"kl_coef": KL_COEF, "importance_cap": cap}
    total = 0.0
    gradients: dict[float, float] = {}  # by the engine's log-probability, which no two tokens share
    batch_count = 0
    for rank in range(ranks):
        of_rank = Ranks(rank=rank, count=ranks, device=CPU)
        for batch in micro_batches_of(
            games, of_rank, tokens_per_batch=tokens_per_batch, token_mean=token_mean
        ):
            engine = batch.engine.double()
            old, new, reference = (engine + shift * torch.sin(c * engine) for shift, c in SHIFTS)
            new.requires_grad_()
            columns = columns_of(replace(batch, engine=engine), old=old, reference=reference)
            loss = getattr(losses, name)(new, columns, **settings)
            loss.total.backward()
            assert new.grad is not None and loss.token_kl.shape == new.shape
            total += loss.total.item()
            gradients |= dict(zip(engine.tolist(), new.grad.tolist(), strict=True))
            batch_count += 1
    tokens = [tokens_of(game) for game in games]
    expected = loss_in_a_loop(name, tokens, cap=cap, token_mean=token_mean)
    assert batch_count >= ranks and (tokens_per_batch > 1 or batch_count == 7)
    assert total == pytest.approx(expected, rel=1e-6)
    everything = [token for game in tokens for token in game]
    assert len(gradients) == len(everything)
    for token in everything:
        assert gradients[token.engine] == pytest.approx(token.derivative, rel=1e-6, abs=1e-9)


def test_the_games_of_the_test_reach_every_branch():
    """Ratios on both sides of both clips, and above the dual clip with a negative advantage."""
    tokens = [token for game in some_games() for token in tokens_of(game)]
    ratios = [(math.exp(token.new - token.old), token.advantage) for token in tokens]
    assert any(ratio > losses.DUAL_CLIP and advantage < 0 for ratio, advantage in ratios)
    assert any(ratio > 1 + CLIP_HIGH and advantage > 0 for ratio, advantage in ratios)
    assert any(ratio < 1 - CLIP and advantage < 0 for ratio, advantage in ratios)
    means = [[token.new - token.old for token in tokens_of(game)] for game in some_games()]
    sequence_ratios = [math.exp(sum(game) / len(game)) for game in means]
    assert min(sequence_ratios) < 1 - CLIP and max(sequence_ratios) > 1 + CLIP_HIGH


def test_the_clip_fraction_is_the_weight_of_the_clipped_tokens():
    columns = LossColumns(
        old=torch.zeros(3),
        reference=None,
        engine=torch.zeros(3),
        advantages=torch.tensor([1.0, -1.0, -1.0]),
        weights=torch.tensor([0.5, 0.3, 0.2]),
        game=torch.tensor([0, 1, 2]),
    )
    new = torch.tensor([0.5, 0.5, 1.5])
    settings = {"clip": 0.2, "clip_high": 0.0, "kl_coef": 0.0, "importance_cap": 0.0}
    expected = {"dr_grpo": 0.5 / losses.MAX_TOKENS, "gspo": 0.5, "dual_clip": 0.7, "cispo": 1.0}
    for name, clip_frac in expected.items():
        loss = getattr(losses, name)(new, columns, **settings)
        assert loss.clip_frac.item() == pytest.approx(clip_frac), name
