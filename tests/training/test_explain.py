"""`--explain`: what it tells is what training does, it is the same every time, and it fits the screen."""

from functools import partial

import pytest
import torch

from prompt_r1.agent.agent import load_policy
from prompt_r1.cli.command_line import train_config
from prompt_r1.distributed.ranks import start_ranks
from prompt_r1.errors import UsageError
from prompt_r1.grpo import grpo_loss
from prompt_r1.training import explain_step
from prompt_r1.training.batch import collate, sequence_mean_weight
from prompt_r1.training.explain import explain
from prompt_r1.training.update import Update
from train import learn


@pytest.fixture(scope="module")
def config(asking_agent):
    return train_config(
        ["--agent", str(asking_agent), "--max-new", "80", "--max-tokens", "900", "--device", "cpu"]
    )[0]


@pytest.fixture(scope="module")
def told(config):
    lines: list[str] = []
    explain(config, lines.append)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def taught(config):
    return explain_step.make_walkthrough(config, start_ranks("cpu"))


def test_it_is_the_same_every_time_and_readable_at_100_columns(config, told):
    again: list[str] = []
    explain(config, again.append)
    assert "\n".join(again) == told
    assert max(map(len, told.splitlines())) <= 100


def test_it_names_every_part_of_the_algorithm_in_order(told):
    parts = ["protocol.Codec.opening", "rollout.play", "agent.engine.Engine.generate", "protocol.parse",
             "reward.score", "grpo.group_advantages", "training.batch.collate", "agent.policy.Policy.forward",
             "grpo.grpo_loss"]  # fmt: skip
    places = [told.index(part) for part in parts]
    assert places == sorted(places)


def test_its_numbers_are_those_of_the_functions(taught, told):
    rewards = [sample.reward.total for sample in taught.games]
    assert len(set(rewards)) > 1
    for sample in taught.games:
        assert f"{sample.reward.total:6.3f}" in told and f"= {sample.advantage:+.4f}" in told
    centre = sum(rewards) / len(rewards)
    spread = (sum((reward - centre) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    assert f"mean = {centre:.4f}, std (n - 1) = {spread:.4f}" in told
    for snapshot in (taught.step.before, taught.step.after):
        assert f"{sum(loss.total.item() for loss in snapshot.losses):+9.5f}" in told


def test_the_step_is_the_one_that_training_takes(taught, config, asking_agent):
    """The lesson's loss and gradient, game by game, against the trainer's own updater on the whole group."""
    policy = load_policy(asking_agent, device=torch.device("cpu"))
    reference = load_policy(asking_agent, device=torch.device("cpu")).requires_grad_(False)
    [whole] = collate(taught.games, partial(sequence_mean_weight, games=len(taught.games)),
                      tokens_per_batch=10**6, device=policy.device)  # fmt: skip
    loss = sum(loss.total.item() for loss in taught.step.before.losses)
    update = Update(config, policy, reference, start_ranks("cpu"))
    metrics = learn(update, [taught.games], clip=config.clip, kl_coef=config.kl_coef)
    assert metrics["grad_norm"] == pytest.approx(taught.step.grad_norm, rel=1e-4)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    with torch.no_grad():
        logprobs = policy(whole.packed).logprobs
        after = grpo_loss(
            logprobs,
            whole.engine,
            whole.engine,
            whole.advantages,
            whole.weights,
            clip=config.clip,
            kl_coef=config.kl_coef,
        )
    told = sum(loss.metrics["loss"].item() - config.kl_coef * loss.metrics["kl"].item()
               for loss in taught.step.after.losses)  # fmt: skip
    kl_to_sampler = config.kl_coef * after.metrics["kl"].item()
    assert after.total.item() - kl_to_sampler == pytest.approx(told, abs=1e-5)


def test_groups_without_spread_are_a_clear_error(taught, config):
    game = taught.games[0].trajectory
    with pytest.raises(UsageError, match="try another --seed"):
        explain_step.choose_group([[game, game]], config)
