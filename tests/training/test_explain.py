"""`--explain`: its numbers are those of training, its output is reproducible and fits the screen."""

import math
from functools import partial
from itertools import groupby

import pytest
import torch

from prompt_r1.agent.loading import load_policy
from prompt_r1.cli.command_line import train_config
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import start_ranks
from prompt_r1.errors import UsageError
from prompt_r1.grpo import grpo_loss
from prompt_r1.training import explain_step
from prompt_r1.training.batch import collate, sequence_mean_weight
from prompt_r1.training.explain import explain
from tests.games import make_update
from train import learn


@pytest.fixture(scope="module")
def config(asking_agent) -> TrainConfig:
    settings = "--max-new 80 --max-tokens 900 --device cpu".split()
    return train_config(["--agent", str(asking_agent), *settings])[0]


def explanation(config: TrainConfig) -> str:
    """The output of `--explain`."""
    lines: list[str] = []
    explain(config, lines.append)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def output(config) -> str:
    return explanation(config)


@pytest.fixture(scope="module")
def walkthrough(config):
    return explain_step.make_walkthrough(config, start_ranks("cpu"))


def test_the_output_is_reproducible_and_fits_100_columns(config, output):
    assert explanation(config) == output
    assert max(map(len, output.splitlines())) <= 100


def test_the_output_names_every_function_of_the_algorithm_in_order(output):
    functions = """
        protocol.Codec.opening rollout.play agent.engine.Engine.generate protocol.parse reward.score
        grpo.group_advantages training.batch.collate agent.policy.Policy.forward grpo.grpo_loss
    """
    positions = [output.index(name) for name in functions.split()]
    assert positions == sorted(positions)


def test_the_output_has_the_numbers_of_the_walkthrough(walkthrough, output):
    rewards = [game.reward.total for game in walkthrough.games]
    assert len(set(rewards)) > 1
    for game in walkthrough.games:
        assert f"{game.reward.total:6.3f}" in output and f"= {game.advantage:+.4f}" in output
    centre = sum(rewards) / len(rewards)
    spread = (sum((reward - centre) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    assert f"mean = {centre:.4f}, std (n - 1) = {spread:.4f}" in output
    for snapshot in (walkthrough.step.before, walkthrough.step.after):
        assert f"{sum(loss.total.item() for loss in snapshot.losses):+9.5f}" in output


def test_the_game_is_printed_turn_by_turn_with_the_tokens_of_its_mask(walkthrough, output):
    totals = [(game.reward.total, len(game.trajectory.turns)) for game in walkthrough.games]
    best = totals.index(max(totals))
    game = walkthrough.games[best].trajectory
    assert f"2. Game {best + 1} of {len(walkthrough.games)} (eqs 1-11)" in output
    runs = [(mask, len(list(run))) for mask, run in groupby(game.sampled)]
    mask = " | ".join(f"{'agent' if mask else 'context'} {count}" for mask, count in runs)
    flat = " ".join(output.split())
    assert f"mask {mask}: {sum(game.sampled)} of {len(game.tokens)} tokens are trained on" in flat
    tokens = " ".join(map(str, game.tokens[:12]))
    assert f"tokens {game.opening}: {tokens} … not trained on" in flat
    logprobs = iter([nats for nats, sampled in zip(game.logprobs, game.sampled, strict=True) if sampled])
    for turn, (_, count) in zip(game.turns, [run for run in runs if run[0]], strict=True):
        nats = sum(next(logprobs) for _ in range(count))
        assert f"agent samples {count} tokens, log π = {nats:.3f}" in flat
        if turn.reply is not None:
            assert f"environment {' '.join(turn.reply.split())}" in flat
    assert f"end {game.stop}; the gold answer is " in flat
    replies = sum(turn.reply is not None for turn in game.turns)
    assert sum(line.startswith("   environment  ") for line in output.splitlines()) == replies
    assert flat.count(", clean") + flat.count("not clean") == len(game.turns)


def test_the_tables_have_the_rewards_tokens_and_losses_of_every_game(walkthrough, output, config):
    lines = [line.split() for line in output.splitlines()]
    games, step = walkthrough.games, walkthrough.step
    for number, game in enumerate(games, start=1):
        reward, terms = game.reward, game.reward.terms
        parts = (terms.interactions, terms.parsed, terms.filled, terms.complete, reward.format)
        row = [str(number), str(len(game.trajectory.turns)), *(f"{part:.2f}" for part in parts)]
        row += ["open" if reward.gate_is_open else "shut", f"{reward.answer:.3f}", f"{reward.total:.3f}"]
        assert any(line[:10] == row for line in lines), row
    for snapshot in (step.before, step.after):
        for number, (batch, loss) in enumerate(zip(snapshot.batches, snapshot.losses, strict=True), start=1):
            count = len(batch.weights)
            kl, clipped = (loss.metrics[name].item() * len(games) for name in ("kl", "clip_frac"))
            row = [number, count, f"{batch.advantages[0]:+.4f}", f"{loss.metrics['loss'].item():+.5f}"]
            [kl_shown, clipped_shown] = next(line[4:] for line in lines if line[:4] == [str(c) for c in row])
            assert float(kl_shown) == pytest.approx(kl, abs=6e-6)
            assert float(clipped_shown) == pytest.approx(clipped, abs=6e-4)
    [place] = [at for at, line in enumerate(lines) if line[:3] == ["token", "log", "π_old"]]
    totals = [(game.reward.total, len(game.trajectory.turns)) for game in games]
    best = totals.index(max(totals))
    batch, logprobs = step.before.batches[best], step.before.logprobs[best]
    for number in range(9):
        old, new, ref = batch.old[number].item(), logprobs[number].item(), batch.ref[number].item()
        numbers = [old, new, ref, math.exp(new - old), step.before.losses[best].kl[number].item()]
        shown = [float(cell) for cell in lines[place + 1 + number][-6:]]
        assert shown == pytest.approx([*numbers, batch.weights[number].item()], abs=6e-5)
    assert "game" in lines[place + 10][:1], "nine tokens are shown"
    for number, game in enumerate(games):
        old, new = (snapshot.logprobs[number].mean().item() for snapshot in (step.before, step.after))
        text = (
            f"game {number + 1} Â = {game.advantage:+.4f} mean log π {old:.5f} → {new:.5f} ({new - old:+.5f})"
        )
        assert text in " ".join(output.split())
    rule = config.reward_rule
    assert (
        f"α = {rule.alpha}, β = {rule.beta}, γ = {rule.gamma}, δ = {rule.delta}, ε = {rule.epsilon};"
        in output
    )
    assert f"gradient norm {step.grad_norm:.4f}, clipped at {config.grad_clip}." in output
    assert f"clip(r, 1 - {config.clip}, 1 + {config.clip})" in output and f"AdamW, lr {config.lr}" in output


def test_the_step_of_the_walkthrough_equals_the_step_of_training(walkthrough, config, asking_agent):
    """Its loss and gradient, computed game by game, against `Update` on the whole group."""
    policy = load_policy(asking_agent, device=torch.device("cpu"))
    reference = load_policy(asking_agent, device=torch.device("cpu")).requires_grad_(False)
    weight = partial(sequence_mean_weight, games=len(walkthrough.games))
    [batch] = collate(walkthrough.games, weight, tokens_per_batch=10**6, device=policy.device)
    loss = sum(loss.total.item() for loss in walkthrough.step.before.losses)
    update = make_update(policy, reference=reference, lr=config.lr, grad_clip=config.grad_clip)
    metrics = learn(update, [walkthrough.games], clip=config.clip, kl_coef=config.kl_coef)
    assert metrics["grad_norm"] == pytest.approx(walkthrough.step.grad_norm, rel=1e-4)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    with torch.no_grad():
        after = grpo_loss(
            policy(batch.packed).logprobs,
            batch.engine,
            batch.engine,
            batch.advantages,
            batch.weights,
            clip=config.clip,
            kl_coef=0.0,  # the surrogate alone
        )
    surrogate = 0.0
    for loss_of_game in walkthrough.step.after.losses:
        metrics = loss_of_game.metrics
        surrogate += metrics["loss"].item() - config.kl_coef * metrics["kl"].item()
    assert after.total.item() == pytest.approx(surrogate, abs=1e-5)


def test_a_group_with_equal_rewards_is_refused(walkthrough, config):
    game = walkthrough.games[0].trajectory
    with pytest.raises(UsageError, match="try another --seed"):
        explain_step.choose_group([[game, game]], config)
