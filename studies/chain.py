"""Does a real model find a chain that nobody showed it, with every seed? `python -m studies.chain`

The agent is SmolLM2-135M, the environment is the mini world, and the questions need a chain: "Who is the
teacher of the star of Hollow Rose?" needs the name in the first reply for its second request. The warm start
shows 128 games (`studies.parts`) in which no request has anything that only a reply has told.

The command makes the warm start, and then trains and evaluates each seed. Started again after a stop, it
resumes. `--seeds 0 2 4` and `--seeds 1 3` in two processes, once the warm start is made, use two cores.
`--tables` trains nothing. `--quick` plays two steps of one seed with the mini agent in a temporary folder.

This plan was made before the runs of seeds 0 to 4. What was tried with seeds 101 and 102, which are not
reported:

- Of 128 games in step 1, 1 of the 16 groups of eight had a chain that was rewarded. So a step of 4 questions
  seldom has one, and then the agent learns to pass the question on, as it did with one seed of
  docs/worlds.md. A temperature of 1.3 did not help (again 1 of 16).
- A warm start with fewer games that pass the question on ("as it is": 0.05 in place of 0.3) doubled these
  groups: 2 of 16 at both temperatures.
- With that start, 16 questions in a step, and without groups of equal rewards, seed 101 learned the chain
  with mini-batches of 128 games and a learning rate of 2e-5: validation EM .16, .69, .91 at steps 0, 4, 8.
- Seed 102 learned it faster with mini-batches of 64 games and 3e-5: .06, .16, .72, .97 at steps 0, 2, 4, 6,
  from 1 group of 16 in step 1. These settings are used.

The plan:

- GRPO finds the chain with every seed, if each of the five test EMs is above 0.9 after at most 2,000 calls
  of training. Calls of validation are counted too, and stated beside.
- `rft` is compared at equal calls: it plays the same kind of questions until it has made 2,000 calls. The
  difference of the test EMs has Student's interval over the seeds. "Differs" means that the interval does not
  contain 0.
- The test has 64 questions of each seed, played greedily. The agent of GRPO is the one that train.py exports,
  which has the highest validation EM (32 questions every two steps).
- The columns of the second table are those from which a user reads, in the first steps, whether a run will
  find the chain: pass@8 (`em/any`: the share of groups of eight games with a right one), and how many of the
  128 games of a step have a chain, and a chain that was rewarded.
- The three games that are shown are of seed 0: the first right one of GRPO, the first wrong one of GRPO, and
  the first wrong one of rft.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import FILE, Prediction, read_predictions
from prompt_r1.f1 import exact_match
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table
from prompt_r1.training.log import read_metrics
from studies.parts import write_games
from studies.runs import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Line,
    Panel,
    Row,
    cost_of,
    em_of,
    figure,
    has_ended,
    read_lines,
    run,
)
from studies.seeds import means_of_seeds, scores_of, table

SEEDS = (0, 1, 2, 3, 4)
GAMES = 128  # demonstrations of the warm start
# `studies.parts` has 0.3, 0.6, 0.05 and 0.05.
STRATEGIES = {"as it is": 0.05, "beginning": 0.85, "vague": 0.05, "guess": 0.05}
QUESTIONS = "--data mini:bridge"
TRAIN = f"""
    --config small {QUESTIONS} --val-data mini:bridge --val-limit 32 --test-data none --max-turns 3
    --questions 16 --group-size 8 --mini-batch 64 --skip-no-spread true --lr 3e-5 --steps 8 --save-every 2
    --ranks 1 --tokens-per-batch 1024"""
EVALUATE = (
    f"{QUESTIONS} --train-data mini:bridge --method direct untrained rft prompt-r1 --optimize-calls 2000"
)
# For --quick, after the flags above, which they replace.
QUICK_TRAIN = "--config mini --kl-coef 0 --questions 2 --steps 2 --mini-batch 16 --val-limit 2"
QUICK_EVALUATE = "--limit 4 --optimize-calls 10"

# Curves of training and lines of rivals in the figure.
GRPO, RFT = Line("GRPO (sampled games)", BLUE), Line("rft (test)", ORANGE, "6 3")
UNTRAINED, ALONE = Line("untrained (test)", GREEN, "2 3"), Line("environment alone (test)", GREY, "1 3")
NAME = re.compile(r"[A-Z][a-z]+ [A-Z][a-z]+")  # of a person or a film of the mini world


def warm_start(out: Path) -> str:
    """Show the games to SmolLM2, unless it has seen them. Returns the agent's folder. Raises UsageError."""
    folder = out / "warm"
    if not has_ended(folder):
        out.mkdir(parents=True, exist_ok=True)
        shown = out / "games.jsonl"
        write_games(shown, GAMES, 0, strategies=STRATEGIES)
        flags = ["--agent", "smollm2", "--games", str(shown), "--out", str(folder)]
        run(["-m", "prompt_r1.training.warm_start", *flags], folder)
    return str(folder / "agent")


def play_seed(out: Path, seed: int, start: str, *, train: str = TRAIN, evaluate: str = EVALUATE) -> None:
    """Train the agent `start` by GRPO and by rft, and test both, unless it is done. Raises UsageError."""
    trained, evaluation = trained_folder(out, seed), evaluation_folder(out, seed)
    if not has_ended(trained):
        flags = ["--agent", start, "--seed", str(seed), "--out", str(trained)]
        run(["train.py", *train.split(), *flags], trained)
    if not has_ended(evaluation):
        run(["evaluate.py", "--agent", str(trained), *evaluate.split(), "--out", str(evaluation)], evaluation)


def trained_folder(out: Path, seed: int) -> Path:
    return out / f"grpo-{seed}"


def evaluation_folder(out: Path, seed: int) -> Path:
    return out / f"evaluation-{seed}"


def has_chain(game: Row) -> bool:
    """Whether a request has a name that the question lacks and that an earlier reply told."""
    told: set[str] = set()
    for turn in game["turns"]:
        if turn["reply"] is None:
            break
        if told & names_in(turn["action"]["prompt"]):
            return True
        told |= names_in(turn["reply"]) - names_in(game["question"]["text"])
    return False


def names_in(text: str) -> set[str]:
    return set(NAME.findall(text))


def is_right(game: Row) -> bool:
    return bool(game["reward"]) and em_of(game) == 1


def learning_of(folder: Path) -> list[str]:
    """How a seed learned: a row of the second table. Steps are separated by commas."""
    steps = [line for line in read_metrics(folder) if "em" in line]
    validations = [line for line in read_metrics(folder) if "val/em" in line]
    chains, rewarded = [], []
    for line in steps:
        games = read_lines(folder / "trajectories" / f"step-{line['step']:06.0f}-rank0.jsonl")
        of_step = [game for game in games if has_chain(game)]
        chains.append(str(len(of_step)))
        rewarded.append(str(sum(map(is_right, of_step))))
    minutes, gigabytes = cost_of(folder)
    return [
        ", ".join(f"{line['em/any']:.2f}" for line in steps),
        ", ".join(chains),
        ", ".join(rewarded),
        ", ".join(f"{line['em']:.2f}" for line in steps),
        ", ".join(f"{line['val/em']:.2f}" for line in validations),
        f"{sum(line['env/calls'] for line in steps):,.0f}",
        f"{sum(line['val/calls'] for line in validations):,.0f}",
        f"{minutes:.0f}",
        f"{gigabytes:.1f}",
    ]


def finished_seeds(out: Path) -> list[int]:
    """The seeds that are trained and evaluated. Raises UsageError if there are none."""
    seeds = [seed for seed in SEEDS if has_ended(evaluation_folder(out, seed))]
    if not seeds:
        raise UsageError(
            f"{out}: no seed is finished; without --tables the command trains and evaluates them"
        )
    return seeds


def report(out: Path) -> None:
    """Print the tables and the games of the finished seeds, and draw curves.svg."""
    seeds = finished_seeds(out)
    answers = [read_predictions(evaluation_folder(out, seed) / FILE) for seed in seeds]
    print(f"Test, seeds {seeds}:\n")
    print(table(answers, "prompt-r1"))
    header = ["seed", "pass@8 by step", "chains", "rewarded", "EM", "validation EM", "calls", "validation"]
    rows = [[str(seed), *learning_of(trained_folder(out, seed))] for seed in seeds]
    print(f"\nTraining:\n\n{markdown_table([*header, 'CPU minutes', 'GB'], rows)}\n")
    for seed in seeds:
        minutes, gigabytes = cost_of(evaluation_folder(out, seed))
        print(f"Evaluation of seed {seed} with its rft: {minutes:.0f} CPU minutes, {gigabytes:.1f} GB")
    for game in shown_games(answers[0]):
        print(f"\n{game.system.method}, {game.question.text} (gold: {game.question.answers[0]})\n{game.raw}")
    (out / "curves.svg").write_text(curves(out, seeds, answers), "utf-8")


def shown_games(answers: Sequence[Prediction]) -> list[Prediction]:
    """The first right game of GRPO, its first wrong one, and the first wrong one of rft."""

    def first(method: str, *, right: bool) -> list[Prediction]:
        games = [one for one in answers if one.system.method == method and not one.error]
        marks = [exact_match(one.answer or "", one.question.answers) == 1 for one in games]
        return [game for game, mark in zip(games, marks, strict=True) if mark == right][:1]

    return [*first("prompt-r1", right=True), *first("prompt-r1", right=False), *first("rft", right=False)]


def curves(out: Path, seeds: Sequence[int], answers: Sequence[Sequence[Prediction]]) -> str:
    """An SVG of the EM of the sampled games by calls of training, with the test EM of the others as lines."""
    lines: list[tuple[Line, list[tuple[float, float]]]] = []
    for seed in seeds:
        calls = 0.0
        points = []
        for step in read_metrics(trained_folder(out, seed)):
            if "em" in step:
                points.append((calls, step["em"]))  # These games were played before the step's update.
                calls += step["env/calls"]
        lines.append((GRPO, points))
    longest = max(points[-1][0] for _, points in lines)
    for rival, method in ((RFT, "rft"), (UNTRAINED, "untrained"), (ALONE, "direct")):
        em = fmean(means_of_seeds(scores_of(answers, method, ["bridge"], 1)))
        lines.append((rival, [(0, em), (longest, em)]))
    panel = Panel("EM by calls of the environment", lines, last_x=f"{longest:,.0f} calls")
    title = "EM of the sampled games of each GRPO seed by calls, and the mean test EM of its rivals"
    return figure(title, [GRPO, RFT, UNTRAINED, ALONE], [panel], width=600)


def main(arguments: list[str]) -> None:
    """Train and evaluate what is missing, and print the results."""
    parser = argparse.ArgumentParser("python -m studies.chain", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/chain"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, choices=SEEDS, help="seeds to train")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument(
        "--quick", action="store_true", help="two steps with the mini agent, in a temporary folder"
    )
    given = parser.parse_args(arguments)
    if given.quick:
        with tempfile.TemporaryDirectory() as name:
            quick_train, quick_evaluate = f"{TRAIN} {QUICK_TRAIN}", f"{EVALUATE} {QUICK_EVALUATE}"
            play_seed(Path(name), 0, "mini", train=quick_train, evaluate=quick_evaluate)
            report(Path(name))
        return
    if not given.tables:
        out = given.out.resolve()
        start = warm_start(out)
        for seed in given.seeds:
            play_seed(out, seed, start)
    report(given.out)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
