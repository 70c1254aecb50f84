"""Proposition 1 with agents that were trained for 1, 2, 3 and 4 turns, instead of one agent's cut-off games.

An agent with T turns can ask T - 1 times. With one turn it is trained as the agent of `grpo-only` is, without
an environment: the rule of the others pays for no game without a question.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prompt_r1.agent.agent import load_agent
from prompt_r1.agent.names import trained_config
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.metrics.text import exact_match
from prompt_r1.miniworld import MiniEnvironment, mini_world
from prompt_r1.report.svg import Plot, Series, rate_text
from prompt_r1.studies.programs import train
from prompt_r1.studies.runs import first_of_each_kind, greedy, play_all, seed_groups
from prompt_r1.studies.study import Study, rate_point
from prompt_r1.studies.turns import CLAIM

MOST_TURNS = 4


@dataclass(frozen=True)
class TurnsRun:
    """A run whose agent was trained for some number of turns."""

    turns: int
    seed: int
    folder: Path


def train_for_turns(out: Path, seeds: Sequence[int], *, steps: int, jobs: int) -> list[TurnsRun]:
    """Train an agent for each number of turns and each seed, `jobs` at a time; finished ones are reused."""
    runs = [
        TurnsRun(turns, seed, out / f"turns{turns}-seed{seed}")
        for seed in seeds
        for turns in range(1, MOST_TURNS + 1)
    ]

    def train_one(run: TurnsRun) -> None:
        flags: dict[str, Sequence[object]] = {"--seed": [run.seed]}
        flags |= {"--env": ["none"]} if run.turns == 1 else {"--max-turns": [run.turns]}
        train(run.folder, steps, flags)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train_one, runs))
    return runs


def play_run(run: TurnsRun, *, per_kind: int) -> dict[str, list[float]]:
    """The EM of greedy games on test questions, by kind of question."""
    config = trained_config(run.folder / "agent")
    assert config is not None, f"{run.folder} was just trained"
    mini = mini_world(run.seed)
    agent = load_agent(run.folder / "agent", config, pick_device("cpu"))
    assert agent.game.max_turns == run.turns, f"{agent.game.max_turns} turns instead of {run.turns}"
    environment = MiniEnvironment(mini.world, "A", seed=run.seed)
    scores: dict[str, list[float]] = {}
    for game in play_all(first_of_each_kind(mini.test, per_kind), greedy(agent), environment.ask, agent):
        em = exact_match(game.answer or "", game.question.answers)
        scores.setdefault(game.question.dataset, []).append(em)
    return scores


def study_trained_turns(scores: Mapping[TurnsRun, Mapping[str, list[float]]]) -> Study:
    """EM by the number of turns of the training, with the seeds apart and pooled."""
    kinds = sorted({kind for of in scores.values() for kind in of})
    groups = seed_groups({run.seed for run in scores})
    header = ["trained for", "n", "all seeds", *groups, *kinds]
    rows, points = [], []
    for turns in range(1, MOST_TURNS + 1):
        own = {run: of for run, of in scores.items() if run.turns == turns}
        everything = [em for of in own.values() for ems in of.values() for em in ems]
        points.append(rate_point(turns, everything))
        cells = [rate_text(points[-1])]
        for seeds in groups.values():
            ems = [em for run, of in own.items() if run.seed in seeds for ems in of.values() for em in ems]
            cells.append(rate_text(rate_point(turns, ems)))
        for kind in kinds:
            cells.append(rate_text(rate_point(turns, [em for of in own.values() for em in of[kind]])))
        rows.append(["1 turn" if turns == 1 else f"{turns} turns", str(len(everything)), *cells])
    notes = (
        "EM [95 % Wilson interval], greedy games of test questions; each agent plays as many turns as it was "
        "trained for, one of which is its answer.",
        "The wordings of the mini world were chosen on seed 0.",
        "By construction, pop and gen need one question, and bridge, compare and math two: with T turns, at "
        "most the kinds that need T - 1 questions can be answered from what the environment says.",
    )
    plot = Plot("Exact match by turns of the training", "turns", "EM", [Series("trained", points)])
    return Study("trained-turns", CLAIM, plot, markdown_table(header, rows), notes)
