"""Proposition 3: an agent trained with one environment also does better with others (eqs 40-54).

The proof bounds the loss of accuracy by the distance between the environments' replies (eq. 46, total
variation). Both mini environments are functions of the prompt, so the distance at a prompt is 0 or 1. Its
mean over the prompts that the trained agent sends at home is a share: of the prompts that get a different
fact (another value, or none), or of those that get a different wording. Environments in between are mixtures:
a hash of the prompt decides which of the two replies.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.metrics.statistics import paired_bootstrap
from prompt_r1.metrics.text import exact_match
from prompt_r1.miniworld import MiniEnvironment
from prompt_r1.miniworld.beliefs import Style
from prompt_r1.miniworld.environment import MiniReply
from prompt_r1.report.svg import Plot, Point, Series, rate_text
from prompt_r1.studies.runs import StudiedRun, greedy, play_all, seed_groups
from prompt_r1.studies.study import Study, rate_point
from prompt_r1.types import Message, Trajectory

CLAIM = (
    "Proposition 3. The agent trained with an LLM as the environment can also perform better with other LLMs."
)
SHARES = (0.25, 0.5, 0.75, 1.0)
SILENCE = MiniReply("I have nothing to say about this.", "")


@dataclass
class Mixture:
    """Replies like `other` (None: silence) to a share of all prompts, and like `home` to the rest."""

    home: MiniEnvironment
    other: MiniEnvironment | None
    share: float
    name: str = "mixture"

    def reply(self, prompt: str) -> MiniReply:
        """The same reply every time to the same prompt."""
        draw = random.Random(f"mixture {self.home.seed} {prompt}".encode("utf-8", "replace")).random()
        if draw >= self.share:
            return self.home.reply(prompt)
        return self.other.reply(prompt) if self.other else SILENCE

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return self.reply(messages[-1]["content"]).text

    async def close(self) -> None:
        pass


@dataclass
class Measurements:
    """What was measured with one environment, over all seeds."""

    environment: str  # "home", the other style or "mute"
    label: str
    fact_differs: list[bool] = field(default_factory=list)  # of each prompt sent at home
    wording_differs: list[bool] = field(default_factory=list)  # of each prompt sent at home
    game_differs: list[bool] = field(default_factory=list)  # of each game at home: any reply differs
    trained: list[float] = field(default_factory=list)  # EM of each question
    untrained: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # of the run, for each question


def study_distance(runs: Sequence[StudiedRun]) -> Study:
    """EM of both agents with the home environment, with the other style, with silence and with mixtures."""
    home = Measurements("home", "home")
    other: Style = "A" if runs[0].environment.style == "B" else "B"
    mixtures = {
        (name, share): Measurements(name, f"{share:.0%} {name}")
        for name in (other, "mute")
        for share in SHARES
    }
    for run in runs:
        own = run.environment
        others = {other: MiniEnvironment(own.world, other, seed=own.seed), "mute": None}
        games = play_all(run.questions, greedy(run.agents["trained"]), own.ask, run.agents["trained"])
        measure(home, run, Mixture(own, None, 0.0), games)
        for (name, share), measured in mixtures.items():
            measure(measured, run, Mixture(own, others[name], share), games)
    everything = [home, *mixtures.values()]
    series = []
    for name in (other, "mute"):
        by_distance = [one for one in everything if one.environment in ("home", name)]
        series += [
            Series(f"trained, {name}", points([(one, one.trained) for one in by_distance]), joined=False),
            Series(
                f"untrained, {name}",
                points([(one, one.untrained) for one in by_distance]),
                dashed=True,
                joined=False,
            ),
        ]
    plot = Plot(
        "Exact match by distance of the environment",
        "share of prompts that get a different fact",
        "EM",
        series,
    )
    notes = (
        f"EM [95 % Wilson interval], greedy games of test questions, {len(runs)} seeds pooled.",
        "Distances: of the prompts that the trained agent sends at home, the share that gets a different "
        "fact from the environment, and the share that gets a different wording.",
        "Margin: trained minus untrained on the same questions, paired bootstrap.",
        "Loss: how much lower the trained agent's EM is than at home. Bound (eq. 48): the share of its games "
        "at home in which any reply would differ; greedy games without such a reply are identical.",
    )
    return Study("distance", CLAIM, plot, distance_table(everything), notes)


def measure(
    measured: Measurements, run: StudiedRun, environment: Mixture, home_games: Sequence[Trajectory]
) -> None:
    """Add one run's distances and scores with an environment."""
    for game in home_games:
        prompts = [turn.action.prompt or "" for turn in game.turns if turn.reply is not None]
        replies = [(run.environment.reply(prompt), environment.reply(prompt)) for prompt in prompts]
        wording_differs = [ours.text != theirs.text for ours, theirs in replies]
        measured.fact_differs += [ours.value != theirs.value for ours, theirs in replies]
        measured.wording_differs += wording_differs
        measured.game_differs.append(any(wording_differs))
    measured.seeds += [run.seed] * len(run.questions)
    for name, scores in (("trained", measured.trained), ("untrained", measured.untrained)):
        agent = run.agents[name]
        games = play_all(run.questions, greedy(agent), environment.ask, agent)
        scores += [exact_match(game.answer or "", game.question.answers) for game in games]


def share_of(flags: Sequence[bool]) -> float:
    """The share of flags that are true; 0 if there are none."""
    return sum(flags) / max(1, len(flags))


def points(measured: Sequence[tuple[Measurements, list[float]]]) -> list[Point]:
    """EM by the distance from home."""
    found = [rate_point(share_of(one.fact_differs), scores) for one, scores in measured]
    return sorted(found, key=lambda point: point.x)


def distance_table(measured: Sequence[Measurements]) -> str:
    """The Markdown table; the first of the environments is home."""
    header = ["environment", "n", "different fact", "different wording", "untrained", "trained", "margin"]
    header += ["loss", "bound"]
    groups = seed_groups(measured[0].seeds)
    header += [f"trained, {group}" for group in groups]
    em_at_home = sum(measured[0].trained) / len(measured[0].trained)
    rows = []
    for one in measured:
        margin = paired_bootstrap(one.trained, one.untrained)
        loss = em_at_home - sum(one.trained) / len(one.trained)
        rows.append(
            [
                one.label,
                str(len(one.trained)),
                f"{share_of(one.fact_differs):.3f}",
                f"{share_of(one.wording_differs):.3f}",
                rate_text(rate_point(0, one.untrained)),
                rate_text(rate_point(0, one.trained)),
                f"{margin.difference:+.3f} [{margin.low:+.2f}, {margin.high:+.2f}]",
                f"{loss:+.3f}",
                f"{share_of(one.game_differs):.3f}",
                *(rate_text(rate_point(0, _of_seeds(one, seeds))) for seeds in groups.values()),
            ]
        )
    return markdown_table(header, rows)


def _of_seeds(measured: Measurements, seeds: Collection[int]) -> list[float]:
    """The trained agents' scores of these seeds."""
    pairs = zip(measured.seeds, measured.trained, strict=True)
    return [score for seed, score in pairs if seed in seeds]
