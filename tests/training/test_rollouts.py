"""`--ahead 1`: which weights play which games, the loss of stale games, stops and resumption."""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from prompt_r1 import playing
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.signals import Interrupt
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training import rollouts as rollouts_module
from prompt_r1.training.lifecycle import Lifecycle
from prompt_r1.training.memory import table_of
from prompt_r1.training.models import load_models
from prompt_r1.training.rollouts import score_again
from prompt_r1.training.run import Run
from prompt_r1.types import Message, Question, Trajectory
from tests import tiny
from tests.faults.harness import games_of, metrics_of, saved_tensors
from tests.games import ONE_RANK, naive_logprobs, random_game, siblings
from tests.paths import ROOT

STEPS = 4  # the third is validated and saved, so the games of the fourth wait for it
HELD = "0/2/0/0"  # the seed of the first game of step 2


class PatientEnvironment:
    """Replies after a few turns of the event loop, and counts its calls; `on_call` may raise an error."""

    def __init__(self) -> None:
        self.rng = random.Random()  # when replies come differs from run to run
        self.calls = 0
        self.on_call: Callable[[], None] = lambda: None

    async def ask(self, messages: list[Message]) -> str:
        self.calls += 1
        self.on_call()
        for _ in range(self.rng.randint(0, 20)):
            await asyncio.sleep(0)
        await asyncio.sleep(self.rng.random() / 100)
        return f"It was Anna, {len(messages[0]['content'])}."


class Straggler:
    """Plays games; one of step 2 does not end before `until` games of step 3 have ended."""

    def __init__(self, until: int = 1) -> None:
        self.until = until
        self.ended: list[str] = []  # the seeds of games, in the order in which they ended
        self.free = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None

    async def play(self, *arguments, seed: str, **options) -> Trajectory:
        trajectory = await playing.play_question(*arguments, seed=seed, **options)
        if seed == HELD:
            await asyncio.wait_for(self.free.wait(), timeout=10)
        self.ended.append(seed)
        if len(self.of_step(3)) == self.until:
            self.free.set()
        self.on_end()
        return trajectory

    def of_step(self, step: int) -> list[str]:
        return [seed for seed in self.ended if seed.startswith(f"0/{step}/")]


class Runs:
    """Runs `train.py` with the same settings in several folders."""

    def __init__(self, folder: Path, agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [{"question": f"Who is number {number}?", "answer": "Anna"} for number in range(6)]
        (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.folder = folder
        self.learn = train.learn
        self.weights: dict[str, list[dict[str, torch.Tensor]]] = {}  # by run, before each of its updates
        self.monkeypatch = monkeypatch
        self.line = f"""
            --agent {agent} --data {folder / "own.jsonl"} --val-data {folder / "own.jsonl"} --test-data none
            --config mini
            --env py:patient_replies:ENVIRONMENT --steps {STEPS} --questions 3 --group-size 5 --mini-batch 15
            --lr 1e-3 --max-turns 3 --max-new 60 --max-tokens 900 --val-every 3 --val-limit 2 --save-every 3
            --device cpu --kv-tokens 20000 --tokens-per-batch 900 --loss token-mean --kl-coef 0
            --journal live
        """.split()

    def run(
        self,
        name: str,
        *line: object,
        ahead: int = 1,
        environment: PatientEnvironment | None = None,
        straggler: Straggler | None = None,
        before_update: Callable[[int], None] = lambda step: None,
    ) -> Path:
        """Train in a folder; `before_update` is called with the number of each update of this start."""
        play = straggler.play if straggler else playing.play_question
        self.monkeypatch.setattr(train, "play_question", play)
        environment = environment or PatientEnvironment()
        self.monkeypatch.setitem(sys.modules, "patient_replies", SimpleNamespace(ENVIRONMENT=environment))
        updates = 0

        def learn(update, *arguments):
            nonlocal updates
            updates += 1
            model = update.policy.model
            copies = {weight: value.detach().clone() for weight, value in model.named_parameters()}
            self.weights.setdefault(name, []).append(copies)
            before_update(updates)
            return self.learn(update, *arguments)

        self.monkeypatch.setattr(train, "learn", learn)
        out = self.folder / name
        train.main([*self.line, "--out", str(out), "--ahead", str(ahead), *map(str, line)])
        return out


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def runs(asking_agent, tmp_path_factory, module_patch) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), asking_agent, module_patch)


@pytest.fixture(scope="module")
def straggler() -> Straggler:
    return Straggler()


@pytest.fixture(scope="module")
def whole(runs, straggler) -> Path:
    """A run that nothing interrupts; a game of step 2 is late."""
    return runs.run("whole", straggler=straggler)


def check_same_run(run: Path, reference: Path) -> None:
    assert saved_tensors(run) == saved_tensors(reference)
    assert games_of(run) == games_of(reference)
    assert learned(run) == learned(reference)


def learned(run: Path) -> list[dict[str, float]]:
    """The metrics that do not depend on the clock. Calls that a stop cut off are counted in other lines, and
    the engine's last bits depend on which games decoded together.
    """
    ignored = ("env/", "ahead/", "engine/logprob_gap")
    return [
        {name: value for name, value in line.items() if not name.startswith(ignored)}
        for line in metrics_of(run)
    ]


def rows_of(run: Path, step: int) -> list[dict]:
    path = run / f"trajectories/step-{step:06d}-rank0.jsonl"
    return [json.loads(row) for row in path.read_text().splitlines()]


def logprobs_after(runs: Runs, run: Path, step: int, row: dict) -> torch.Tensor:
    """(N,) float64 log-probabilities of the agent's tokens of a game, with the weights after a step."""
    model = tiny.model()
    model.load_state_dict(runs.weights[run.name][step], strict=False)
    trajectory = Trajectory(
        Question("", "", "", ()), row["tokens"], [digit == "1" for digit in row["sampled"]]
    )
    with torch.no_grad():
        return naive_logprobs(model.double(), trajectory)


def test_the_games_of_a_step_come_from_weights_that_are_exactly_one_update_older(runs, whole):
    """The recorded log-probabilities are those of these weights, and of no others.

    The games of the first step come from the start, and those after a step that is validated and saved from
    its weights: no game is in flight meanwhile.
    """
    for step, sampler in ((1, 0), (2, 0), (3, 1), (4, 3)):
        rows = rows_of(whole, step)[:4]
        for played_by in range(step):
            distance = max(
                (logprobs_after(runs, whole, played_by, row) - torch.tensor(row["logprobs"]))
                .abs()
                .max()
                .item()
                for row in rows
            )
            assert (distance < 1e-3) == (played_by == sampler), (step, played_by, distance)


def test_games_begin_while_a_game_of_the_step_before_still_waits(whole, straggler):
    """Games of step 3 began only when all of step 2 had ended: a late reply held all of them up.

    With the late game in step 2, the other tests check that each game still has the right weights.
    """
    assert straggler.ended.index(HELD) > straggler.ended.index(straggler.of_step(3)[0])
    assert [len(straggler.of_step(step)) for step in range(1, STEPS + 1)] == [15] * STEPS


@pytest.mark.parametrize("cap", [2.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_stale_games_are_weighted_by_the_truncated_ratio_of_the_policy_to_the_sampler(whole, runs, cap):
    """L = -Σ w min(π_old / π_sampler, C) Â, because π_θ = π_old in the only optimiser step."""
    step = 2
    run = whole if cap == 2 else runs.run("capped", "--importance-cap", cap, "--steps", step)
    total = unweighted = tokens = staleness = truncated = 0.0
    for row in rows_of(run, step):
        if row["advantage"] is None:
            continue
        old, sampler = (logprobs_after(runs, run, step - n, row) for n in (1, 2))
        ratios = (old - sampler).exp()
        total -= ratios.clamp(max=cap).sum().item() * row["advantage"]
        unweighted -= len(old) * row["advantage"]
        staleness += (old - sampler).abs().sum().item()
        truncated += (ratios > cap).sum().item()
        tokens += len(old)
    line = read_metrics(run)[step]
    assert line["loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert abs(total - unweighted) / tokens > 1e-4
    assert line["engine/staleness"] == pytest.approx(staleness / tokens, rel=1e-3) and staleness > 0
    assert line["engine/importance_truncated"] == pytest.approx(truncated / tokens, abs=1e-3)
    assert truncated > 0


def test_the_first_step_is_that_of_a_synchronous_run(whole, runs):
    synchronous = runs.run("synchronous", "--steps", 1, ahead=0)
    first, expected = (learned(run)[1] for run in (whole, synchronous))
    expected = {name: value for name, value in expected.items() if not name.startswith("val/")}
    assert first == expected | {"engine/staleness": 0.0}
    assert games_of(whole)["step-000001-rank0"] == games_of(synchronous)["step-000001-rank0"]


@pytest.mark.slow
def test_when_replies_come_changes_nothing(whole, runs):
    """Other games decode together, so the engine's last bits differ; the update does not use them.

    No game of step 2 is late here.
    """
    check_same_run(runs.run("again"), whole)


def test_the_gap_between_engine_and_sampler_is_measured_at_every_step(whole):
    """The staleness is 0, up to rounding, where the newest weights have played."""
    for line in read_metrics(whole)[1:]:
        assert 0 < line["engine/logprob_gap"] < 1e-4
        assert (line["engine/staleness"] > 1e-4) == (line["step"] in (2, 3))


@pytest.mark.slow
def test_an_engine_that_plays_another_model_is_found_in_a_stale_step(runs, monkeypatch):
    """The games of step 2 claim other log-probabilities than those of the weights that played."""

    steps = 0

    def score_shifted(games: list[Trajectory], *arguments, **options):
        nonlocal steps
        steps += 1
        for game in games if steps == 2 else []:
            game.logprobs = [logprob and logprob - 0.1 for logprob in game.logprobs]
        return score_again(games, *arguments, **options)

    monkeypatch.setattr(rollouts_module, "score_again", score_shifted)
    with pytest.raises(UsageError, match="engine does not play the model that learns: engine/logprob_gap"):
        runs.run("other-model")
    assert [line["step"] for line in read_metrics(runs.folder / "other-model")] == [0, 1]


# --- Stops and resumption ---


@pytest.mark.parametrize("update", [2, pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_run_that_is_killed_in_an_update_ends_like_an_uninterrupted_one(runs, whole, update):
    """A copy of the run folder from before an update, while games are being played, is a killed run.

    It goes on from step 0 or 3, which were validated and saved: a checkpoint holds no games.
    """
    name = f"killed-{update}"

    def copy(number: int) -> None:
        if number == update:
            shutil.copytree(runs.folder / f"{name}-whole", runs.folder / name)

    runs.run(f"{name}-whole", before_update=copy)
    environment = PatientEnvironment()
    check_same_run(runs.run(name, environment=environment), whole)
    paid = sum(line["env/paid"] for line in read_metrics(whole))
    assert 0 < environment.calls <= paid
    assert (environment.calls < paid) == (update == 4)  # the games of steps 1 to 3 are not played again


def check_steps(run: Path) -> None:
    """Every step was trained and logged once."""
    assert [line["step"] for line in read_metrics(run)] == list(range(STEPS + 1))


def test_a_stop_while_games_of_two_steps_are_played_saves_the_step(runs):
    """The games in flight are lost, and those of the next step are played with the newest weights."""
    stopped = Straggler(until=99)

    def stop() -> None:
        if len(stopped.of_step(2)) == 14 and len(stopped.of_step(3)) >= 4:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped.on_end = stop
    with pytest.raises(Resumable, match="stopped after step 1"):
        runs.run("stopped", straggler=stopped)
    resumed = Straggler(until=0)
    resumed.free.set()
    run = runs.run("stopped", straggler=resumed)
    check_steps(run)
    assert [len(resumed.of_step(step)) for step in (1, 2, 3, 4)] == [0, 15, 15, 15]
    assert read_metrics(run)[2]["engine/staleness"] < 1e-4


@pytest.mark.slow
def test_a_signal_in_an_update_stops_after_it(runs, whole):
    """After a step that is saved anyway the resumed run ends like one that was not stopped."""
    for step in (1, 3):

        def stop(number: int, *, step: int = step) -> None:
            if number == step:
                os.kill(os.getpid(), signal.SIGTERM)

        name = f"signalled-{step}"
        with pytest.raises(Resumable, match=f"stopped after step {step}"):
            runs.run(name, before_update=stop)
        check_steps(runs.run(name))
    check_same_run(runs.folder / "signalled-3", whole)


@pytest.mark.slow
def test_a_budget_that_is_used_up_in_games_of_the_next_step_stops_and_resumes(runs, whole):
    paid = int(sum(line["env/paid"] for line in read_metrics(whole)))
    with pytest.raises(Resumable, match="stopped after step"):
        runs.run("budget", "--max-env-calls", paid - 1)
    check_steps(runs.run("budget"))


@pytest.mark.slow
def test_a_stop_in_the_very_first_games_resumes(runs, whole):
    environment = PatientEnvironment()
    calls_before_training = int(read_metrics(whole)[0]["env/paid"])

    def stop() -> None:
        if environment.calls == calls_before_training + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    environment.on_call = stop
    with pytest.raises(Resumable, match="stopped after step 0"):
        runs.run("at-once", environment=environment)
    check_same_run(runs.run("at-once"), whole)


@pytest.mark.slow
def test_a_rollback_trains_on_the_games_that_the_best_agent_would_have_played(runs, monkeypatch):
    """After the rollback to step 0 the games of the next one are the same as before."""
    seen: list[tuple[int, list]] = []
    original = Lifecycle.finish_step

    def finish_step(self, step, games_PG, metrics):
        seen.append((step, [game.trajectory.tokens for group in games_PG for game in group]))
        original(self, step, games_PG, metrics)

    monkeypatch.setattr(Lifecycle, "finish_step", finish_step)
    alarms = iter([[], [], ["entropy is 9"]])  # with the line of step 2
    monkeypatch.setattr("prompt_r1.training.alarms.Watchdog.see", lambda self, line: next(alarms, []))
    run = runs.run("rollback", "--on-collapse", "rollback")
    steps = [step for step, _ in seen]
    assert steps == [1, 2, 1, 2, 3, 4] and seen[2] == seen[0]
    aside = (run / "metrics-before-rollback-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [1, 2]
    check_steps(run)


def test_the_last_step_begins_no_games(whole):
    paid = sum(line["env/paid"] + line["env/reused"] for line in read_metrics(whole))
    played = sum(line.get("env/calls", 0) + line.get("val/calls", 0) for line in read_metrics(whole))
    assert paid == played


# --- Parts ---


def test_scores_are_the_log_probabilities_of_the_policy_and_replace_the_engines_in_float32():
    policy = tiny.policy()
    games = [*siblings(1, 3), random_game(0), random_game(1), *siblings(2, 2)]
    recorded = [list(game.logprobs) for game in games]
    with torch.no_grad():
        expected = [naive_logprobs(policy.model, game) for game in games]
    differences = torch.cat(score_again(games, policy, tokens_per_batch=40))
    for game, before, want in zip(games, recorded, expected, strict=True):
        got = torch.tensor([value for value, own in zip(game.logprobs, game.sampled, strict=True) if own])
        assert torch.allclose(got.double(), want, atol=1e-5)
        assert all(value == 0 for value, own in zip(game.logprobs, game.sampled, strict=True) if not own)
        assert len(game.logprobs) == len(before)
    engine = torch.tensor([value for values in recorded for value in values if value])
    assert sorted(differences.abs().tolist()) == pytest.approx(
        sorted((torch.cat(expected) - engine).abs().tolist()), abs=1e-4
    )


def test_in_16_bits_the_engines_log_probabilities_stay():
    policy = tiny.policy()
    policy.compute = torch.bfloat16
    games = [random_game(number) for number in range(6)]
    recorded = [list(game.logprobs) for game in games]
    differences = score_again(games, policy, tokens_per_batch=30)
    assert [game.logprobs for game in games] == recorded and len(differences) == 1


def test_two_copies_and_two_caches_are_counted_as_documented():
    documented = (ROOT / "docs/options.md").read_text("utf-8")
    for ahead, cache in ((0, "KV cache"), (1, "KV cache of each")):
        table = table_of(tiny.qwen3_4b_config(), TrainConfig(ahead=ahead)).splitlines()
        rows = {row[:40].strip(): row[40:].split() for row in table}
        assert ("second copy that plays" in rows) == (ahead == 1)
        names = ("together", f"80 GB: {cache}, thousand tokens", "80 GB: left over")
        cells = " | ".join(rows[name][-2] for name in names)  # of 8 GPUs
        assert f"| `--ahead {ahead}` | {cells} |" in documented


def test_agents_take_turns_with_the_newest_weights(asking_agent, tmp_path):
    config = TrainConfig(agent=str(asking_agent), device="cpu", ahead=1)
    models = load_models(Run(config, tmp_path, ONE_RANK, asyncio.Runner(), Interrupt()))
    first, second = models.agents
    assert len({id(policy) for policy in (first.policy, second.policy, models.policy)}) == 3
    before = [weight.clone() for weight in models.policy.parameters()]
    with torch.no_grad():
        for weight in models.policy.parameters():
            weight += 1
    models.refresh()
    assert models.agent is second and models.agents == [second, first]
    for old, new, learned, start in zip(
        first.policy.parameters(),
        second.policy.parameters(),
        models.policy.parameters(),
        before,
        strict=True,
    ):
        assert torch.equal(old, start) and torch.equal(new, learned)


def test_only_one_step_ahead_is_possible():
    with pytest.raises(UsageError, match="--ahead must be below 2"):
        train.main(["--config", "mini", "--ahead", "2"])
    assert TrainConfig().ahead == 0


def test_adapters_which_learn_and_play_as_one_are_refused():
    with pytest.raises(UsageError, match="give one of the two"):
        train.main(["--config", "mini", "--ahead", "1", "--adapter-rank", "4"])
