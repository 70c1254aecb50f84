r"""Does the paper's rule train an agent, and does its gate matter? `python -m studies.rules --out DIR`.

The command trains the runs of RUNS that are not finished, one after the other, and prints the tables of all
finished runs; it also draws `curves.svg` in --out. Started again after a stop, it resumes. `--tables` trains
nothing. `--quick` trains one step of two runs in a temporary folder.

Every run is `train.py --config mini` with another reward, so agent, questions, order and sampling seeds of a
seed are equal:

    paper        --rule paper: the coefficients of Appendix G. The gate (eq. 15) needs two good turns
    release      --rule release: the coefficients of the released code, the default of the mini world. The
                 gate needs one good turn
    additive     R_fmt + R_ans with the paper's coefficients, without a gate
    answer only  R_ans
    format only  R_fmt with the paper's coefficients

Validation: 100 questions every five steps. Test: 320 questions, 64 of each kind, played greedily by the agent
that train.py exports. It has the highest validation EM or, under the last three rewards, the highest
validation reward.

This plan was made before any run. Three seeds are compared on the same test questions. Differences are to
`paper`. Their intervals are Student's over the seeds, and "differs" means that an interval does not contain
0. The comparisons of a column are not corrected for their number.

- The paper's rule trains, if validation EM reaches 0.9 with every seed, and test EM differs from that of the
  untrained agent. If only some seeds reach it, the rule trains with these seeds only.
- A newcomer chooses between `paper` and `release` by test EM if it differs, otherwise by the calls per
  question if they differ, otherwise by the steps to a validation EM of 0.9. If nothing differs, the paper's.
- The gate matters here if `additive` differs in test EM or in the share of well-formed games. Otherwise the
  mini world does not show that it matters, and no more than that: its agent starts with well-formed games,
  so it need not learn the format.
- The format reward is needed here if `answer only` has fewer well-formed games or a lower EM, and it differs.
- `format only` is the control. If it reaches 0.9, the format reward alone teaches the agent to ask well, and
  the other rows do not show that answers were rewarded.

The games that are shown are chosen by rule: seed 0 of `paper`, the first right game about a bridge question,
the first right game about a question of one step, and the first wrong game.

After the runs of `paper` with seeds 0 and 1, the table of EM by kind of question was added to the plan,
because the validation of these runs did not reach 0.7.

The last run has the paper's instruction (400 tokens in place of 60), SmolLM2 and one seed. All else is as in
docs/models.md, "A small real model", with 16 steps. The question is whether validation EM rises. One seed
compares nothing.

    python -m prompt_r1.training.warm_start --agent smollm2 --games mini:pop --preset paper \
        --out runs/warm-paper
    python train.py --config small --agent runs/warm-paper/agent --instruction paper --max-turns 2 \
        --max-tokens 1024 --steps 16 --save-every 4 --out runs/long
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prompt_r1.errors import UsageError
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table
from prompt_r1.training.log import read_metrics
from prompt_r1.training.run_folder import TEST_FILE
from prompt_r1.types import Reward, Trajectory
from studies import runs
from studies.runs import BLUE, ORANGE, Line, Panel, Row, dialogue, em_of, read_lines
from studies.seeds import Scores, difference, mean_text, means_of_seeds, of_dataset, percent, percent_by_seed

RULES = {
    "paper": "--rule paper",
    "release": "--rule release",
    "additive": "--rule paper --reward studies.rules:additive",
    "answer only": "--rule paper --reward studies.rules:answer_only",
    "format only": "--rule paper --reward studies.rules:format_only",
}
ABLATIONS = ("additive", "answer only", "format only")
SEEDS = (0, 1, 2)
# (rule, seed) of all runs, in the order in which they are trained.
RUNS = [
    *(("paper", seed) for seed in SEEDS),
    *((rule, 0) for rule in ABLATIONS),
    *(("release", seed) for seed in SEEDS),
    *((rule, seed) for seed in SEEDS[1:] for rule in ABLATIONS),
]
EVERY_RUN = "--config mini --ranks 1 --save-every 5"
QUICK_RUNS = [("paper", 0), ("additive", 0)]
QUICK = "--steps 1 --questions 4 --val-limit 5 --test-data mini:pop"
REACHED = 0.9
Finished = Mapping[str, Mapping[int, Path]]  # rule → seed → the folder of a finished run


def additive(game: Trajectory, paper: Reward) -> float:
    """R_fmt + R_ans without a gate. The paper's -ε is left out: a constant changes no advantage (eq. 16)."""
    return paper.format + paper.answer


def answer_only(game: Trajectory, paper: Reward) -> float:
    """R_ans."""
    return paper.answer


def format_only(game: Trajectory, paper: Reward) -> float:
    """R_fmt."""
    return paper.format


def folder_of(out: Path, rule: str, seed: int) -> Path:
    """The folder of a run."""
    return out / f"{rule.replace(' ', '-')}-{seed}"


def is_finished(folder: Path) -> bool:
    """Whether a run has been tested, which is its last action."""
    return (folder / TEST_FILE).is_file()


def train(folder: Path, rule: str, seed: int, more_flags: str = "") -> None:
    """Train a run to its end in a new process. Raises UsageError."""
    flags = f"{EVERY_RUN} {RULES[rule]} --seed {seed} {more_flags}".split()
    runs.run(["train.py", *flags, "--out", str(folder)], folder)


def test_games(folder: Path, agent: str) -> list[Row]:
    """The test games of a run's agent, "trained" or "untrained"."""
    return read_lines(folder / "trajectories" / f"test-{agent}-rank0.jsonl")


def format_of(game: Row) -> float:
    """1 if a game is well formed (`reward.well_formed`), else 0."""
    is_clean = all(turn["action"]["clean"] for turn in game["turns"])
    return float(is_clean and bool(game["answer"]))


def calls_of(game: Row) -> float:
    return sum(turn["reply"] is not None for turn in game["turns"])


def scores_of(folders: Mapping[int, Path], agent: str, measure: Callable[[Row], float]) -> Scores:
    """What `measure` says of each test game. `folders`: seed → run."""
    scores: Scores = {}
    for seed, folder in folders.items():
        for game in test_games(folder, agent):
            question = game["question"]
            scores.setdefault((seed, question["dataset"]), {})[question["id"]] = measure(game)
    return scores


def steps_to(metrics: Sequence[Mapping[str, float]], reached: float) -> str:
    """The step of the first validation with this EM; "–" if there is none."""
    for line in metrics:
        if line.get("val/em", 0.0) >= reached:
            return f"{line['step']:.0f}"
    return "–"


def tables(finished: Finished) -> str:
    """The tables of accuracy, accuracy by kind of question, calls and cost.

    `paper` must have the seeds of the other rules.
    """
    systems = {"untrained": (finished["paper"], "untrained")}
    systems |= {rule: (folders, "trained") for rule, folders in finished.items()}

    def measured(measure: Callable[[Row], float]) -> dict[str, Scores]:
        return {name: scores_of(folders, agent, measure) for name, (folders, agent) in systems.items()}

    em, formats, calls = measured(em_of), measured(format_of), measured(calls_of)

    compared = ["by seed", "minus paper"]
    accuracy = [[name, *compared_rates(em, name), *compared_rates(formats, name)] for name in systems]
    header = ["rule", "test EM, %", *compared, "well formed, %", *compared]
    shown = [markdown_table(header, accuracy)]

    kinds = sorted({kind for _, kind in em["paper"]})
    by_kind = [[name, *(percent(of_dataset(em[name], kind)) for kind in kinds)] for name in systems]
    shown.append(markdown_table(["rule: test EM, %", *kinds], by_kind))

    asked = []
    for name, own in calls.items():
        minus_paper = "" if name == "paper" else difference(own, calls["paper"], "+.2f", scale=1)
        in_pop = per_question(of_dataset(own, "pop"))
        asked.append([name, per_question(own), minus_paper, in_pop])
    shown.append(markdown_table(["rule", "calls", "minus paper", "calls in `pop`"], asked))

    learned = [[rule, *learning_of(folders)] for rule, folders in finished.items()]
    header = ["rule", f"steps to {REACHED}", "last val EM", "calls of training", "CPU minutes", "GB"]
    shown.append(markdown_table(header, learned))
    return "\n\n".join(shown)


def compared_rates(scores: Mapping[str, Scores], name: str) -> list[str]:
    """A rate of a system in percent: its mean, the means of its seeds, and the difference to `paper`."""
    own = scores[name]
    minus_paper = "" if name == "paper" else difference(own, scores["paper"])
    return [percent(own), percent_by_seed(own), minus_paper]


def per_question(counts: Scores) -> str:
    """The mean of what is counted in each game."""
    return mean_text(means_of_seeds(counts), ".2f")


def learning_of(folders: Mapping[int, Path]) -> list[str]:
    """How the runs of a rule learned, and their cost; a value for each seed."""
    steps, last, calls, minutes, memory = [], [], [], [], []
    for folder in folders.values():
        metrics = read_metrics(folder)
        steps.append(steps_to(metrics, REACHED))
        last.append(f"{metrics[-1]['val/em']:.2f}")
        calls.append(f"{sum(line.get('env/calls', 0.0) for line in metrics):,.0f}")
        cpu_minutes, gigabytes = runs.cost_of(folder)
        minutes.append(f"{cpu_minutes:.1f}")
        memory.append(f"{gigabytes:.1f}")
    return [", ".join(values) for values in (steps, last, calls, minutes, memory)]


def shown_games(folder: Path) -> str:
    """Three test games: a right one of two steps, a right one of one step, and a wrong one."""
    games = test_games(folder, "trained")
    right = [game for game in games if em_of(game) == 1]
    chosen = [
        *[game for game in right if game["question"]["dataset"] == "bridge"][:1],
        *[game for game in right if game["question"]["dataset"] == "pop"][:1],
        *[game for game in games if em_of(game) != 1][:1],
    ]
    return "\n\n".join(map(dialogue, chosen))


CURVES = {"val/em": Line("EM", BLUE), "val/format": Line("well formed", ORANGE, "4 3")}


def figure(finished: Finished) -> str:
    """An SVG of the validations: a panel for each rule, with a curve of each seed."""
    panels = []
    for rule, folders in finished.items():
        curves = []
        for folder in folders.values():
            validations = [line for line in read_metrics(folder) if "val/em" in line]
            for metric, line in CURVES.items():
                curves.append((line, [(values["step"], values[metric]) for values in validations]))
        panels.append(Panel(rule, curves, last_x=f"step {validations[-1]['step']:.0f}"))
    title = "Validation EM and share of well-formed games by step, for each reward and seed"
    return runs.figure(title, list(CURVES.values()), panels)


def finished_runs(out: Path) -> Finished:
    """The runs in the folder of all runs that are finished."""
    finished: dict[str, dict[int, Path]] = {}
    for rule in RULES:
        folders = {seed: folder_of(out, rule, seed) for seed in SEEDS}
        done = {seed: folder for seed, folder in folders.items() if is_finished(folder)}
        if done:
            finished[rule] = done
    return finished


def report(out: Path) -> None:
    """Print the tables and the games of the finished runs, and draw the figure."""
    finished = finished_runs(out)
    if 0 not in finished.get("paper", {}):
        raise UsageError(f"{out}: seed 0 of the rule `paper` is not finished")
    print(tables(finished))
    print()
    print(shown_games(finished["paper"][0]))
    (out / "curves.svg").write_text(figure(finished), "utf-8")


def main(arguments: list[str]) -> None:
    """Train what is missing, and print the results."""
    parser = argparse.ArgumentParser("python -m studies.rules", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/rules"), help="folder of all runs")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="one step of two runs, in a temporary folder")
    given = parser.parse_args(arguments)
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            for rule, seed in QUICK_RUNS:
                train(folder_of(Path(folder), rule, seed), rule, seed, QUICK)
            report(Path(folder))
        return
    for rule, seed in RUNS:
        run = folder_of(given.out, rule, seed)
        if not given.tables and not is_finished(run):
            train(run, rule, seed)
    report(given.out)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
