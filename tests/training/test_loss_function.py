"""--loss-function: the user's own loss in the loop of train.py, and the mistakes in it."""

import importlib
import shutil
import sys

import pytest
import torch

from prompt_r1.errors import UsageError
from prompt_r1.grpo import Loss, grpo_loss
from prompt_r1.model.policy import PolicyOutput
from prompt_r1.settings.functions import import_loss
from prompt_r1.training.log import read_metrics
from prompt_r1.training.loss_function import TRIAL, batch_of_trial, loss_of_run, try_loss
from prompt_r1.training.preflight import read_training
from prompt_r1.training.update import UpdateStats
from tests.support import tiny
from tests.support.exports import load_tensors
from tests.support.games import Learner, random_scored_games, record_logprobs_of
from tests.support.programs import run_here
from tests.support.settings import train_config

OWN = """
from pathlib import Path

import torch

from prompt_r1.grpo import Loss, grpo_loss

NUMBER = 1


def loss_of(terms, columns):
    zero = torch.zeros(())
    return Loss((columns.weights * terms).sum(), zero, zero, torch.zeros_like(columns.weights))


def good(logprobs, columns, **settings):
    return loss_of(-columns.advantages * logprobs, columns)


def misspelt(logprobs, columns, **settings):
    return loss_of(-columns.advantage * logprobs, columns)


def no_reference(logprobs, columns, **settings):
    return loss_of(columns.reference - logprobs, columns)


def not_a_number(logprobs, columns, **settings):
    return loss_of(logprobs * float("nan"), columns)


def a_vector(logprobs, columns, **settings):
    loss = grpo_loss(logprobs, columns, **settings)
    return Loss(loss.token_kl, loss.kl, loss.clip_frac, loss.token_kl)


def no_token_kl(logprobs, columns, **settings):
    loss = grpo_loss(logprobs, columns, **settings)
    return Loss(loss.total, loss.kl, loss.clip_frac, loss.kl)


def a_number(logprobs, columns, **settings):
    loss = grpo_loss(logprobs, columns, **settings)
    return Loss(loss.total.item(), loss.kl, loss.clip_frac, loss.token_kl)


def a_tensor(logprobs, columns, **settings):
    return loss_of(-columns.advantages * logprobs, columns).total


def without_gradient(logprobs, columns, **settings):
    return loss_of(-columns.advantages * logprobs.detach(), columns)


def infinite_gradient(logprobs, columns, **settings):
    return loss_of((logprobs - logprobs.detach()).abs().sqrt(), columns)


def mean_of_the_micro_batch(logprobs, columns, **settings):
    loss = good(logprobs, columns, **settings)
    total = (-columns.advantages * logprobs).sum() / max(len(logprobs), 1)
    return Loss(total, loss.kl, loss.clip_frac, loss.token_kl)


def mean_of_nothing(logprobs, columns, **settings):
    loss = good(logprobs, columns, **settings)
    return Loss(loss.total + 0 * logprobs.mean(), loss.kl, loss.clip_frac, loss.token_kl)


def calls_torch(logprobs, columns, **settings):
    return loss_of(torch.stack([logprobs, columns.old[:-1]]), columns)


def one_argument(logprobs):
    return 0


def wants_more(logprobs, columns, temperature):
    return 0


def takes_clip_and_all(logprobs, columns, *, clip, **others):
    return grpo_loss(logprobs, columns, clip=clip, **others)


def broken_for_now(logprobs, columns, **settings):
    if Path("broken").exists():
        return not_a_number(logprobs, columns, **settings)
    return good(logprobs, columns, **settings)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with a module of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_loss", raising=False)
    (tmp_path / "own_loss.py").write_text(OWN)
    importlib.invalidate_caches()
    return tmp_path


def line_of(text: str) -> int:
    """The line of a text in the user's module."""
    return 1 + OWN.splitlines().index(text)


def test_the_papers_loss_by_its_name_is_the_default_bit_for_bit():
    """It takes the settings of the command line by their names."""
    weights = []
    for name in ("", "prompt_r1.grpo:grpo_loss"):
        policy = tiny.policy()
        games = record_logprobs_of(policy, random_scored_games(6))
        settings = {"kl_coef": 0.1, "clip": 0.05, "reference": tiny.policy(seed=1)}
        Learner(policy, loss_function=name, **settings).learn([games[:3], games[3:], games])
        weights.append([weight.detach().clone() for weight in policy.parameters()])
    assert all(torch.equal(own, default) for own, default in zip(*weights, strict=True))


def test_a_users_loss_replaces_eq_17(own):
    """Against the gradient of -Σ w Â log π, game by game."""
    policy, twin = tiny.policy(), tiny.policy()
    games = record_logprobs_of(policy, random_scored_games(4))
    learner = Learner(policy, loss_function="own_loss:good", tokens_per_batch=1)
    gradients = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
    )
    learner.learn([games])
    for batch in Learner(twin, tokens_per_batch=10_000).micro_batches(games):
        (-batch.weights * batch.advantages * twin(batch.packed).logprobs).sum().backward()
    expected = torch.cat([weight.grad.flatten() for weight in twin.parameters()])
    expected *= min(1.0, 1.0 / expected.norm().item())
    assert (gradients[0] - expected).norm() < 1e-5 * expected.norm()


MISTAKES = [
    (
        "misspelt",
        r"raised AttributeError: 'LossColumns' object has no attribute 'advantage' \(own_loss.py, line "
        f"{line_of('    return loss_of(-columns.advantage * logprobs, columns)')}\\)$",
    ),
    (
        "no_reference",
        r"called without columns.reference \(--kl-coef 0\), raised TypeError: .* \(own_loss.py, line "
        f"{line_of('    return loss_of(columns.reference - logprobs, columns)')}\\)$",
    ),
    ("not_a_number", "returned the total nan for 9 tokens"),
    ("a_vector", r"returned total of shape \[9\], not \[\], for 9 tokens"),
    ("no_token_kl", r"returned token_kl of shape \[\], not \[9\], for 9 tokens"),
    ("a_number", r"returned total of shape float, not \[\]"),
    ("a_tensor", r"returned a Tensor, not a prompt_r1.grpo.Loss"),
    ("without_gradient", "returned total without a gradient: compute it from logprobs"),
    ("infinite_gradient", "its total has no finite gradient with respect to logprobs$"),
    ("mean_of_the_micro_batch", "one by one add up to .*, but together it is .* columns.weights$"),
    ("mean_of_nothing", "returned the total nan for 0 tokens"),
    ("calls_torch", r"raised RuntimeError: stack .* \(own_loss.py, line \d+\)$"),
    ("one_argument", r"cannot be called as function\(logprobs, columns, clip=…, clip_high=…"),
    ("wants_more", r"cannot be called as function\(logprobs, columns"),
    ("NUMBER", "cannot be called as function"),
    ("nowhere", "cannot import"),
]


@pytest.mark.parametrize(("name", "sentence"), MISTAKES, ids=[name for name, _ in MISTAKES])
def test_a_mistake_in_a_loss_is_one_sentence_before_the_first_game(own, name, sentence):
    """Of a run whose endpoint does not answer: the loss is tried before it is asked."""
    line = f"--config mini --ranks 1 --env m@http://a.invalid/v1 --kl-coef 0 --loss-function own_loss:{name}"
    with pytest.raises(UsageError, match=f"^--loss-function.*{sentence}") as refused:
        run_here("train.py", *line.split())
    assert "\n" not in str(refused.value)


def test_no_backward_runs_before_the_ranks_are_forked(own, monkeypatch):
    """A bug: with --device cpu on a machine with a GPU, torch refused the backward of every rank."""
    events = []
    backward = torch.Tensor.backward

    def noted_backward(total: torch.Tensor) -> None:
        events.append("backward")
        backward(total)

    monkeypatch.setattr(torch.Tensor, "backward", noted_backward)
    monkeypatch.setattr("prompt_r1.training.start.fork_ranks", lambda *_, **__: events.append("fork"))
    with pytest.raises(UsageError, match="no finite gradient"):
        run_here("train.py", *"--config mini --loss-function own_loss:infinite_gradient".split())
    assert events == ["fork", "backward"]


@pytest.mark.parametrize("name", ["first_version", "dr_grpo", "dual_clip", "gspo", "cispo"])
@pytest.mark.parametrize("kl_coef", ["0", "0.1"])
def test_the_losses_of_the_examples_pass_the_trial(name, kl_coef):
    loss = f"examples.losses:{name}"
    try_loss(train_config(["--loss-function", loss, "--kl-coef", kl_coef]), import_loss(loss))


def test_the_trial_has_ratios_on_both_sides_of_1():
    """Otherwise a mistake in one branch of a loss would be found only after games were played."""
    logprobs, columns = batch_of_trial(TRIAL, has_reference=True)
    for other in (columns.old, columns.reference):
        assert (logprobs > other).any() and (logprobs < other).any()


def test_a_loss_gets_the_settings_of_the_command_line(own):
    config = train_config("--loss-function own_loss:takes_clip_and_all --clip 0.1".split())
    loss_of = loss_of_run(config, import_loss(config.loss_function), importance_cap=2.0)
    logprobs, columns = batch_of_trial(TRIAL, has_reference=True)
    expected = grpo_loss(
        logprobs, columns, clip=0.1, clip_high=0.0, kl_coef=config.kl_coef, importance_cap=2.0
    )
    assert torch.equal(loss_of(logprobs, columns).total, expected.total)


def test_the_metrics_of_a_loss_keep_no_graph():
    """They are collected over the micro-batches of a step, so each would keep its activations."""
    logprobs, columns = batch_of_trial(TRIAL, has_reference=False)
    loss = Loss(logprobs.sum(), kl=logprobs.sum(), clip_frac=logprobs.sum(), token_kl=2 * logprobs)
    stats = UpdateStats()
    stats.add(columns, PolicyOutput(logprobs, entropy=logprobs.detach()), loss)
    [measured] = stats.pending
    assert not measured.token_kl.requires_grad and not measured.log_ratio.requires_grad


def test_after_a_loss_that_fails_the_run_goes_on_from_its_last_step(own, asking_agent, monkeypatch):
    """Step 2 returns NaN. Once the function is mended, the same command ends with the weights of a run that
    never failed.
    """
    line = (
        "--config mini --env mini --data mini:validation --val-data none --test-data none --questions 2 "
        "--group-size 4 --mini-batch 4 --max-turns 1 --max-new 30 --max-tokens 900 --steps 2 --save-every 1 "
        f"--device cpu --agent {asking_agent} --loss-function own_loss:broken_for_now --out"
    ).split()
    run_here("train.py", *line, "whole")
    run_here("train.py", *line, "failing", "--steps", "1")
    kept = load_tensors(own / "failing/agent")

    (own / "broken").touch()
    monkeypatch.setattr("prompt_r1.training.start.try_loss", lambda config, own: None)  # it would see it
    with pytest.raises(UsageError, match=r"own_loss:broken_for_now returned the"):
        run_here("train.py", *line, "failing")
    assert [row["step"] for row in read_metrics(own / "failing")] == [0, 1]
    assert all(
        torch.equal(kept[name], tensor) for name, tensor in load_tensors(own / "failing/agent").items()
    )

    (own / "broken").unlink()
    run_here("train.py", *line, "failing")
    whole, resumed = load_tensors(own / "whole/agent"), load_tensors(own / "failing/agent")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert not all(torch.equal(resumed[name], tensor) for name, tensor in kept.items())


def test_a_run_is_not_resumed_with_another_loss(own, asking_agent):
    shutil.copy("own_loss.py", "other_loss.py")
    line = (
        "--config mini --env mini --data mini:validation --val-data none --test-data none --questions 1 "
        "--group-size 2 --mini-batch 2 --max-new 8 --max-tokens 900 --steps 1 --out run --agent"
    ).split()
    line.append(str(asking_agent))
    run_here("train.py", *line, "--loss-function", "own_loss:good")
    with pytest.raises(UsageError, match="loss_function = 'own_loss:good', not 'other_loss:good'"):
        read_training([*line, "--loss-function", "other_loss:good"])
