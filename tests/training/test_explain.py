"""`--explain`: its numbers are those of training, its output is reproducible and fits the screen."""

from functools import partial

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
