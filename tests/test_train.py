"""The settings of train.py, checked in the metrics, games, checkpoints and agents that it writes; and what
the replies to a game cost, from the prices to the reward.
"""

import json
import sys
from collections import Counter
from inspect import signature
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml

import train
from prompt_r1.environments.journal import Journal
from prompt_r1.errors import FatalEnvError, UsageError
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.training import loss_function
from prompt_r1.training import models as models_file
from prompt_r1.training import run as run_file
from prompt_r1.training import start as start_file
from prompt_r1.training.log import read_metrics
from prompt_r1.training.run import RunQuestions
from prompt_r1.training.update import GRADIENT_LIMIT
from prompt_r1.types import Reward, Trajectory
from tests.support import tiny
from tests.support.exports import load_tensors, recorded_games
from tests.support.programs import run_here

SMALL = (
    "--config mini --env mini --questions 2 --group-size 4 --mini-batch 8 --max-turns 2 --max-new 58 "
    "--max-tokens 900 --lr 1e-3 --steps 1 --device cpu"
).split()


@pytest.fixture(scope="module")
def random_agent(tmp_path_factory) -> Path:
    """An agent with random weights: all its games are different, and none is well-formed."""
    return tiny.save_agent(tmp_path_factory.mktemp("random_agent"))


def train_run(folder: Path, agent: Path, *line: object) -> Path:
    """Run train.py in this process with SMALL and the given settings, and return the folder of the run.

    There is no validation and no test unless `line` names their questions, and few questions to train on:
    the start tokenizes each of them.
    """
    out = folder / "run"
    arguments = ["--agent", str(agent), "--out", str(out), *SMALL, *map(str, line)]
    for flag, names in (("--data", "mini:validation"), ("--val-data", "none"), ("--test-data", "none")):
        if flag not in line:
            arguments += [flag, names]
    run_here("train.py", *arguments)
    return out


def games_of(run: Path, step: int) -> list[dict]:
    return recorded_games(run, f"step-{step:06d}")


def write_questions(folder: Path, *texts: str, copies: int = 1) -> Path:
    """Write a file of questions; the copies of a question have different ids."""
    rows = [{"id": f"{text}{n}", "question": text, "answer": "Anna"} for n in range(copies) for text in texts]
    path = folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_games_are_played_with_the_weights_of_the_previous_step(asking_agent, tmp_path):
    """After an update the engine's KV cache is stale: if it were kept, the engine's log-probabilities would
    differ from the policy's. The KL to the frozen reference grows. With one optimiser step per training step
    the advantages cancel, so the loss is kl_coef * KL.
    """
    run = train_run(tmp_path, asking_agent, "--kl-coef", "0.25", "--steps", 2)
    first, second = read_metrics(run)[1:]
    for line in (first, second):
        assert line["grad_norm"] > 0.01 and 0 < line["engine/logprob_gap"] < 1e-4
        assert line["engine/importance_mean"] == 1 and line["engine/importance_truncated"] == 0  # float32
        assert line["loss"] == pytest.approx(0.25 * line["kl"], rel=1e-3, abs=1e-6)
    assert first["kl"] < 1e-6 and second["kl"] > 1e-4


def test_the_order_in_which_a_rank_plays_its_questions_does_not_change_the_mini_batches(
    asking_agent, tmp_path, monkeypatch
):
    """A game's place follows from its question's number among those of all ranks, not of its own rank."""
    line = ["--mini-batch", 4, "--max-new", 40, "--max-turns", 1]
    expected = load_tensors(train_run(tmp_path / "0", asking_agent, *line) / "agent")
    of_rank = RunQuestions.of_rank
    monkeypatch.setattr(
        RunQuestions, "of_rank", lambda *arguments: dict(reversed(of_rank(*arguments).items()))
    )
    tensors = load_tensors(train_run(tmp_path / "1", asking_agent, *line) / "agent")
    assert all(torch.allclose(tensors[name], tensor, atol=1e-5) for name, tensor in expected.items())


def test_a_call_names_its_question_the_number_of_its_game_and_the_epoch(asking_agent, tmp_path):
    """By these the journal tells apart equal prompts of different games, and a route chooses by the first."""
    data = write_questions(tmp_path, "Who?", "When?")
    env = ["--env", "py:tests.support.own_environments:ByCaller"]
    # An agent that does not change, and a temperature at which most of its prompts are the same.
    epochs = ["--questions", 2, "--steps", 2, "--temperature", 0.3, "--lr", 1e-9, "--max-turns", 2]
    run = train_run(tmp_path, asking_agent, *env, "--data", data, "--group-size", 8, *epochs)
    replies = {}
    for game in games_of(run, 1):
        if (reply := game["turns"][0]["reply"]) is not None:
            replies.setdefault(game["question"]["id"], []).append(reply)
    assert sum(map(len, replies.values())) > 2
    for question, texts in replies.items():
        assert len(set(texts)) == len(texts) and all(f"says {question} in game" in text for text in texts)
    assert not any(metrics["env/reused"] for metrics in read_metrics(run))


def test_a_run_of_two_epochs_says_at_each_start_that_it_repeats_its_questions(asking_agent, tmp_path, capsys):
    """Its config.yaml has the number of steps, so that it documents the run without the questions."""
    data = write_questions(tmp_path, "Who?", "When?", "Why?")
    line = ["--agent", asking_agent, "--out", tmp_path / "run", "--data", data, "--val-data", "none"]
    settings = " ".join([*SMALL, "--max-turns 1"]).replace("--steps 1", "--epochs 2").split()
    run_here("train.py", *line, *settings)
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    drawn = Counter(game["question"]["id"] for step in (1, 2, 3) for game in games_of(tmp_path / "run", step))
    assert set(drawn.values()) == {2 * 4}, "2 epochs, 4 games of a question"
    assert capsys.readouterr().out.count("3 questions 2.0 times") == 1
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (saved["steps"], saved["epochs"]) == (3, 0)
    run_here("train.py", *line, *settings)  # It is finished, and says so again.
    assert capsys.readouterr().out.count("3 questions 2.0 times") == 1


def test_the_final_table_compares_greedy_games_of_the_untrained_agent_and_the_best_one(
    asking_agent, tmp_path, capsys
):
    """Four copies of a question give four equal games, and each row equals the metrics of a validation."""
    data = write_questions(tmp_path, "Who is the director of Silver River?", copies=4)
    line = ["--data", data, "--val-data", data, "--test-data", data, "--temperature", "0.7"]
    run = train_run(tmp_path, asking_agent, *line)
    assert len({len(game["turns"]) for game in games_of(run, 1)}) > 1
    printed = capsys.readouterr().out
    validated = {line["step"]: line for line in read_metrics(run)}
    for metrics in validated.values():
        assert metrics["val/n"] == 4 and metrics["val/turns"].is_integer() and metrics["val/format"] in (0, 1)
    best = json.loads((run / "agent/training.json").read_text())["step"]
    for name, step in [("untrained agent", 0), ("trained agent", best)]:
        expected = [validated[step][f"val/{key}"] for key in ("em", "f1", "reward", "format", "turns")]
        [shown] = [line for line in printed.splitlines() if line.startswith(name)]
        assert list(map(float, shown.split()[-5:])) == pytest.approx(expected, abs=6e-4)
        assert name in (run / "report.html").read_text("utf-8")


def test_training_validation_and_test_play_their_own_questions(random_agent, tmp_path):
    flags: list[object] = ["--max-new", 1]
    for name in ("data", "val-data", "test-data"):
        (tmp_path / name).mkdir()
        flags += [f"--{name}", write_questions(tmp_path / name, name, copies=2)]
    run = train_run(tmp_path, random_agent, *flags)
    for name, file in (
        ("step-000001", "data"),
        ("validation-000000", "val-data"),
        ("validation-000001", "val-data"),
        ("test-untrained", "test-data"),
        ("test-trained", "test-data"),
    ):
        assert {game["question"]["text"] for game in recorded_games(run, name)} == {file}, name


@pytest.fixture(scope="module")
def one_step(asking_agent, tmp_path_factory) -> Path:
    """A run of one step with other settings of the loss and the optimiser."""
    line = "--loss token-mean --lr 2e-3 --beta2 0.95 --weight-decay 0.3 --max-turns 1".split()
    return train_run(tmp_path_factory.mktemp("one"), asking_agent, *line)


def test_with_token_mean_the_loss_is_averaged_over_tokens(one_step):
    """In the first optimiser step every ratio is 1 and the KL is 0, so the loss is minus the mean advantage.
    Over the games of a group the advantages cancel; over their tokens they do not.
    """
    advantages = [
        game["advantage"] for game in games_of(one_step, 1) for _ in range(game["sampled"].count("1"))
    ]  # of each token
    expected = -sum(advantages) / len(advantages)
    assert abs(expected) > 1e-3
    assert read_metrics(one_step)[1]["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_first_optimiser_step_equals_adamw_with_the_given_settings(asking_agent, one_step):
    """w ← w (1 - lr · decay) - lr · m / (√v + ε); after bias correction m = g and v = g², with g the clipped
    gradient.
    """
    lr, beta1, beta2, decay = 2e-3, 0.9, 0.95, 0.3
    before, after = load_tensors(asking_agent), load_tensors(one_step / "agent")
    saved = load_tensors(one_step / "checkpoints/step-000001")
    first = {name: saved[f"adam/model.{name}/exp_avg"] for name in before}
    second = {name: saved[f"adam/model.{name}/exp_avg_sq"] for name in before}
    norm = torch.cat([moment.flatten() for moment in first.values()]).norm().item() / (1 - beta1)
    assert norm == pytest.approx(min(read_metrics(one_step)[1]["grad_norm"], GRADIENT_LIMIT), rel=1e-3)
    for name, old in before.items():
        m, v = first[name] / (1 - beta1), second[name] / (1 - beta2)
        assert torch.allclose(m**2, v, rtol=1e-3, atol=1e-12), name
        expected = old * (1 - lr * decay) - lr * m / (v.sqrt() + 1e-8)
        assert torch.allclose(after[name], expected, atol=1e-5), name


def test_without_a_reference_the_kl_to_the_policy_before_the_step_is_logged(
    asking_agent, tmp_path, monkeypatch
):
    """0 in the first mini-batch, where nothing has moved yet. The loss has the command line's settings."""
    loss = Mock(wraps=loss_function.grpo_loss)
    monkeypatch.setattr(loss_function, "grpo_loss", loss)
    line = "--kl-coef 0 --mini-batch 4 --lr 0.01 --clip 0.1 --clip-high 0.3 --max-turns 1".split()
    assert read_metrics(train_run(tmp_path, asking_agent, *line))[1]["kl"] > 0
    settings = {"clip": 0.1, "clip_high": 0.3, "kl_coef": 0.0}
    assert all(settings.items() <= call.kwargs.items() for call in loss.call_args_list) and loss.called


def test_every_part_of_a_run_has_its_seed(asking_agent, tmp_path, monkeypatch):
    """Agent, adapters, environment, questions and games."""
    names = "add_lora open_environment training_and_validation find_questions questions_of_step"
    files = (start_file, models_file, run_file)
    monkeypatch.setattr(NamedAgent, "make", made := Mock(return_value=asking_agent))
    homes = {name: next(file for file in files if hasattr(file, name)) for name in names.split()}
    originals = {name: getattr(home, name) for name, home in homes.items()}
    spies = {name: Mock(wraps=original) for name, original in originals.items()}
    for name, spy in spies.items():
        monkeypatch.setattr(homes[name], name, spy)
    monkeypatch.setattr(train, "play_question", played := Mock(wraps=train.play_question))
    train_run(tmp_path, asking_agent, "--seed", 3, "--adapter-rank", 1, "--max-new", 20)
    for name in names.split():
        calls = [signature(originals[name]).bind(*one.args, **one.kwargs) for one in spies[name].mock_calls]
        assert {call.arguments["seed"] for call in calls} == {3}, name
    made.assert_called_once_with(3)
    seeds = [one.args[3].seed for one in played.mock_calls]
    assert all(seed.startswith("3/1/") for seed in seeds) and len(set(seeds)) == len(seeds) > 1


def test_an_environment_that_fails_in_the_first_step_leaves_no_checkpoint(asking_agent, tmp_path):
    """Nothing has been trained, so there is nothing to resume."""
    with pytest.raises(FatalEnvError, match="invalid key"):
        train_run(tmp_path, asking_agent, "--env", "py:tests.support.own_environments:Unauthorized")
    assert not list((tmp_path / "run/checkpoints").glob("*"))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0]


def dollars(game: Trajectory, paper: Reward) -> float:
    """A reward that is what the replies to a game cost."""
    return game.spent.usd


def test_each_game_records_what_its_replies_cost_before_it_is_scored(asking_agent, tmp_path):
    line = "--env mini,mini-b --route 3,1 --env-price 2,8 --reward tests.test_train:dollars"
    run = train_run(tmp_path, asking_agent, *line.split())
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    for line in lines:
        assert line["reward/mean"] == pytest.approx(line["game/usd"]) and line["game/usd"] > 0
    # Equal calls are paid once, by the run; each game is charged for its own.
    assert sum(line["game/usd"] * line["games"] for line in lines) >= lines[-1]["env/usd"] > 0


def test_a_run_ends_with_what_it_cost_with_the_test(asking_agent, tmp_path, capsys):
    """The last row of steps said $0.0026, the bill $0.0029: no number had the calls of the test."""
    question = {"question": "Who directed Silent Valley?", "answer": "Felix Berger"}
    (tmp_path / "test.jsonl").write_text(json.dumps(question))
    run = train_run(tmp_path, asking_agent, "--env-price", "2,8", "--test-data", tmp_path / "test.jsonl")
    spent = Journal(run / "journal", rank=1).charged
    assert spent.usd > read_metrics(run)[-1]["env/usd"] > 0, "the test costs something"
    assert f"The run cost {spent}:" in capsys.readouterr().out


# Rewards and advantages that differ between games and turns, and an environment that can break.
OF_LENGTH = """
def length(game, paper):
    return len(game.tokens) / 7


def of_turns(games):
    return [[game.advantage * (turn + 1) for turn in range(len(game.trajectory.turns))] for game in games]


class Fragile:
    error = None

    def ask(self, messages):
        if self.error:
            raise self.error
        return "Anna"
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A module of the user in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_code.py").write_text(OF_LENGTH)
    sys.modules.pop("own_code", None)  # Another test may have imported a module of this name.
    yield
    sys.modules.pop("own_code", None)


BUG = ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    "broken, error, message",
    [
        ("reward", BUG, "raised ZeroDivisionError.*"),
        ("environment", BUG, "raised ZeroDivisionError.*"),
        ("environment", FatalEnvError("invalid key"), "invalid key; stopped"),
    ],
)
def test_a_mistake_in_code_of_the_user_costs_no_step_that_was_trained(
    asking_agent, tmp_path, own_code, broken, error, message
):
    """A bug: the run ended without a checkpoint of its last steps. A wrong key ended it as resumable."""
    line = ["--steps", 3, "--reward", "own_code:length", "--env", "py:own_code:Fragile", "--max-turns", 2]
    expected = load_tensors(train_run(tmp_path / "whole", asking_agent, *line) / "agent")
    own_code = sys.modules["own_code"]
    length, calls = own_code.length, 0

    def breaks_after_two_steps(game, paper):
        nonlocal calls
        calls += 1
        if broken == "environment" and calls == 2 * 8:
            own_code.Fragile.error = error
        if broken == "reward" and calls > 2 * 8:
            raise error
        return length(game, paper)

    own_code.length = breaks_after_two_steps
    with pytest.raises(UsageError, match=rf"{message} after step 2, the same command"):
        train_run(tmp_path / "stopped", asking_agent, *line)
    own_code.length, own_code.Fragile.error = length, None
    resumed = train_run(tmp_path / "stopped", asking_agent, *line)
    assert [metrics["step"] for metrics in read_metrics(resumed)] == [0, 1, 2, 3]
    tensors = load_tensors(resumed / "agent")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_an_environment_that_fails_in_the_test_says_that_the_command_resumes(
    asking_agent, tmp_path, own_code
):
    question = {"question": "Who directed Silent Valley?", "answer": "Felix Berger"}
    (tmp_path / "test.jsonl").write_text(json.dumps(question))
    line = ["--steps", 2, "--reward", "own_code:length", "--env", "py:own_code:Fragile", "--max-turns", 2]
    train_run(tmp_path, asking_agent, *line)
    sys.modules["own_code"].Fragile.error = FatalEnvError("invalid key")
    with pytest.raises(FatalEnvError, match="invalid key; stopped after step 2, the same command resumes"):
        train_run(tmp_path, asking_agent, *line, "--test-data", tmp_path / "test.jsonl")


def test_centred_advantages_are_not_divided_by_the_deviation(asking_agent, tmp_path, own_code):
    line = "--advantage centred --reward own_code:length --max-turns 1".split()
    run = train_run(tmp_path, asking_agent, *line)
    games = games_of(run, 1)
    for start in (0, 4):
        group = games[start : start + 4]
        rewards = [game["reward"]["total"] for game in group]
        assert len(set(rewards)) > 1
        expected = [reward - sum(rewards) / 4 for reward in rewards]
        assert [game["advantage"] for game in group] == pytest.approx(expected)


def test_the_users_advantages_of_turns_reach_the_loss_and_the_trajectories(
    asking_agent, tmp_path, own_code, monkeypatch
):
    """The loss sees, for each token, the advantage of its turn."""
    seen: Counter[float] = Counter()

    def grpo_loss(logprobs, columns, **settings):
        seen.update(columns.advantages.tolist())
        return original(logprobs, columns, **settings)

    original = loss_function.grpo_loss
    monkeypatch.setattr(loss_function, "grpo_loss", grpo_loss)
    functions = ["--reward", "own_code:length", "--advantage-function", "own_code:of_turns"]
    games = games_of(train_run(tmp_path, asking_agent, *functions), 1)
    expected: Counter[float] = Counter()
    for game in games:
        turns = game["turn_advantages"]
        assert game["advantage"] == pytest.approx(sum(turns) / len(turns))
        assert turns == pytest.approx([turns[0] * (number + 1) for number in range(len(game["turns"]))])
        agents_turns = [len(run) for run in game["sampled"].split("0") if run]
        for advantage, tokens in zip(turns, agents_turns, strict=True):
            expected[torch.tensor(advantage).item()] += tokens
    assert max(len(game["turns"]) for game in games) > 1 and seen == expected


@pytest.mark.parametrize("masked", [True, False])
def test_games_that_were_cut_off_leave_the_loss_and_not_the_metrics(
    asking_agent, tmp_path, own_code, masked, monkeypatch
):
    """By the number of tokens that the loss sees."""
    tokens = 0

    def grpo_loss(logprobs, columns, **settings):
        nonlocal tokens
        tokens += len(logprobs)
        assert columns.weights.sum().item() == pytest.approx(1.0)  # a step is one micro-batch here
        return original(logprobs, columns, **settings)

    original = loss_function.grpo_loss
    monkeypatch.setattr(loss_function, "grpo_loss", grpo_loss)
    line = ["--reward", "own_code:length", "--mask-truncated", str(masked).lower()]
    run = train_run(tmp_path, asking_agent, *line)
    games = games_of(run, 1)
    cut = [game["stop"] == "max_tokens" for game in games]
    assert any(cut) and not all(cut)
    kept = [game for game in games if not masked or game["stop"] != "max_tokens"]
    assert tokens == sum(game["sampled"].count("1") for game in kept)
    metrics = read_metrics(run)[1]
    assert metrics["stop/max_tokens"] == pytest.approx(sum(cut) / len(cut)) and metrics["groups/dropped"] == 0
