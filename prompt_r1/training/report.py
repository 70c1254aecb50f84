"""Write the report of a run: `python -m prompt_r1.training.report runs/mini-seed0`.

The report is one HTML file, made from an autoescaped template. It loads no other file, so it needs no
network. It shows the metrics as static SVG charts, and games from the files of the run.
"""

if __name__ == "__main__":  # Check before the imports below, which fail where a package is missing.
    from prompt_r1.programs.installation import check_installation

    check_installation()

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, UndefinedError
from markupsafe import Markup

from prompt_r1.errors import UsageError
from prompt_r1.f1 import exact_match
from prompt_r1.pair.named_agent import exported_step
from prompt_r1.programs.command_line import Parser, program_name, run_program
from prompt_r1.programs.files import replace_file
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import read_mapping
from prompt_r1.training.charts import HEIGHT, WIDTH, Lines, charts_of, points_of
from prompt_r1.training.log import read_json_lines, read_metrics
from prompt_r1.training.run_folder import TEST_FILE

HERE = Path(__file__).parent
JsonObject = Mapping[str, Any]  # a game in a line of trajectories/*.jsonl, or a part of it
MAX_GROUPS = 12  # the page shows this many groups of each step
# Values of damaged files raise these errors while the page is made.
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UndefinedError)


def write_report(run: Path) -> Path:
    """Write the page of a run, and return its path. Raises UsageError for a folder without a run."""
    path = run / "report.html"
    replace_file(path, page(run).encode())
    return path


def page(run: Path) -> str:
    """Return the HTML page of a run. Raises UsageError for a folder without a run."""
    lines = read_metrics(run)
    if not lines:
        raise UsageError(
            f"{run}: there are no metrics in metrics.jsonl; give a run folder, such as runs/mini-seed0"
        )
    settings = read_mapping(run / "config.yaml")
    best = exported_step(run / "agent")
    test_file = run / TEST_FILE
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((HERE / "page.html").read_text("utf-8"))
    try:
        html = template.render(
            name=run.resolve().name,
            agent=settings["agent"],
            environment=settings["env"],
            style=Markup((HERE / "page.css").read_text("utf-8")),
            script=Markup((HERE / "page.js").read_text("utf-8")),
            result=_result(lines, best),
            counts=_counts(lines),
            settings=(run / "config.yaml").read_text("utf-8"),
            test=test_file.read_text("utf-8", "replace") if test_file.is_file() else "",
            charts=charts_of(lines),
            width=WIDTH,
            height=HEIGHT,
            groups=read_groups(run, best=best),
            is_right=is_right,
            sum_of_reward=own_reward if settings["reward"] else sum_of_reward,
            most=MAX_GROUPS,
        )
    except DAMAGED as error:
        raise UsageError(f"{run}: its settings, metrics or games are damaged ({error!r:.200})") from None
    return printable(html)  # A game may have characters that hide or reorder others.


def _result(lines: Lines, best: int) -> str:
    """The result in one line: EM of the first and best validation or, without them, first and last reward."""
    validated = dict(points_of(lines, "val/em"))
    if len(validated) > 1 and best in validated:
        first = min(validated)
        return f"Validation EM {validated[first]:.3f} → {validated[best]:.3f} at step {best}"
    rewards = [reward for _, reward in points_of(lines, "reward/mean")]
    if rewards:
        return f"Reward {rewards[0]:.3f} → {rewards[-1]:.3f}"
    return "No step has been trained yet"


def _counts(lines: Lines) -> dict[str, int]:
    """How many steps, games and calls the run has had, by label."""
    totals = defaultdict[str, float](float)
    for line in lines:
        for name, value in line.items():
            if name.startswith("env/outcomes/"):  # There is a count for each label of odd replies.
                name = "env/outcomes"
            totals[name] += value
    counts = {
        "steps": lines[-1]["step"],
        "games trained": totals["games"],
        "calls sent": totals["env/paid"],
        "calls from the journal": totals["env/reused"],
        "requests retried": totals["env/failed_requests"],
        "calls failed": totals["env/errors"] + totals["val/errors"],
        "replies filtered, cut or empty": totals["env/outcomes"],
    }
    return {label: round(count) for label, count in counts.items()}


@dataclass
class ShownGroup:
    """The games of one question in one step, such as "training step 3"."""

    source: str
    games: list[JsonObject]

    @property
    def right(self) -> int:
        """The number of right games."""
        return sum(is_right(game) is True for game in self.games)

    @property
    def share_right(self) -> str:
        """How many games are right: none, mixed or all. A control of the page selects groups by it."""
        if self.right == 0:
            return "none"
        return "mixed" if self.right < len(self.games) else "all"

    @property
    def lacks_contrast(self) -> bool:
        """Whether the group has no advantages, or its games are all right or all wrong."""
        trained = any(game["advantage"] for game in self.games)
        return not trained or self.share_right != "mixed"


def is_right(game: JsonObject) -> bool | None:
    """Whether the answer equals a gold answer; None for long texts, for which only F1 means something."""
    answer, question = game["answer"], game["question"]
    if question["kind"] == "text":
        return None
    return exact_match(answer or "", question["answers"]) == 1


def sum_of_reward(reward: JsonObject) -> str:
    """The reward of a game as the sum of eq. 15."""
    total, answer, format_reward = reward["total"], reward["answer"], reward["format"]
    counted = answer if reward["gate_is_open"] else 0.0
    epsilon = format_reward + counted - total  # The run's files do not have ε, but it follows from the sum.
    terms = f"reward {total:.2f} = −{epsilon:.2f} + format {format_reward:.2f}"
    if reward["gate_is_open"]:
        return f"{terms} + answer {answer:.2f}"
    return f"{terms}; the gate is shut: answer {answer:.2f} does not count"


def own_reward(reward: JsonObject) -> str:
    """The reward by the function of the user, beside the terms of eq. 15."""
    return (
        f"reward {reward['total']:.2f} by --reward; format {reward['format']:.2f}, "
        f"answer {reward['answer']:.2f}"
    )


def read_groups(folder: Path, *, best: int) -> list[ShownGroup]:
    """The training games of the first, middle, last and best step, and the validation games of the best.

    Groups with right and wrong games come first, because the agent learns from them. Lines that a kill has
    cut short are skipped.
    """
    trajectories = folder / "trajectories"
    # The files of all ranks have the names step-000003-rank0.jsonl, step-000003-rank1.jsonl, …
    steps = sorted({file.name.partition("-rank")[0] for file in trajectories.glob("step-*-rank*.jsonl")})
    wanted = {f"step-{best:06d}", f"validation-{best:06d}"}
    if steps:
        wanted |= {steps[0], steps[len(steps) // 2], steps[-1]}
    groups: list[ShownGroup] = []
    for name in sorted(wanted):
        played: list[ShownGroup] = []
        for file in sorted(trajectories.glob(f"{name}-rank*.jsonl")):
            # Each rank numbers its own groups from 0.
            for _, games in groupby(read_json_lines(file), key=itemgetter("group")):
                played.append(ShownGroup(_source(name), list(games)))
        groups += sorted(played, key=attrgetter("lacks_contrast"))[:MAX_GROUPS]
    return sorted(groups, key=attrgetter("lacks_contrast"))


def _source(name: str) -> str:
    """The source of the games in a file: "training step 3" for step-000003."""
    kind, step = name.split("-")
    return f"{'training' if kind == 'step' else kind} step {int(step)}"


def main(arguments: list[str]) -> None:
    """Write the report from a command line."""
    parser = Parser(program_name(), description="Write RUN/report.html, the report of a run.")
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/mini-seed0")
    path = write_report(parser.parse_args(arguments).run)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
