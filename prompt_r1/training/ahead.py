"""`--ahead 1`: while a step computes or waits, the games of the next steps are being played.

θ(k) are the weights after the update of step k. Two agents take turns with them:

    learner   | update k |  wait  | update k+1 |  wait  | update k+2 |  wait  | …
    agent A     games k+1, θ(k-1) |            | games k+3, θ(k+1)            |
    agent B              | games k+2, θ(k)              |            | games k+4, θ(k+2) …

Games begin as soon as an update has made their weights, and must have ended before the next update but one.
So they may last for one update and two waits. Games and updates take turns in one thread: between two
micro-batches the games go on until all of them wait for a reply. This hides the waiting, but no computation.
Validation and checkpoint of step k come at the end of its wait, while games k+2 are being played.

From step 2 on, the games of a step are exactly one update old: they were played with θ(k-2) and are trained
on at θ(k-1). `grpo.importance_weights` corrects for that, as in decoupled PPO (Hilton et al. 2021,
arXiv 2110.00641; for language models AReaL, Fu et al. 2025, arXiv 2505.24298).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prompt_r1.agent.agent import Agent
from prompt_r1.agent.packing import fill, pack
from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.data.sampler import QuestionSampler
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.training.event_loop import until_idle
from prompt_r1.training.gap import engine_gap
from prompt_r1.training.weights import Models
from prompt_r1.types import Action, Question, Trajectory, Turn

FILE = "next-games.json"  # in a checkpoint; each rank writes its share

Rollout = tuple[list[int], list[list[Trajectory]]]  # the numbers of a rank's questions, and their games
PlayOne = Callable[[Question, str, int], Awaitable[Trajectory]]
PlayStep = Callable[[int, Agent], Coroutine[None, None, Rollout]]


class WaitFor(Protocol):
    """`Run.wait_for`, of a rollout."""

    def __call__(self, work: Coroutine[None, None, Rollout]) -> Rollout: ...


@dataclass
class StepGames:
    """The games of a step: being played, or finished. A checkpoint holds them."""

    step: int
    stale: bool  # an update comes between them and their own
    games: dict[str, Trajectory] = field(default_factory=dict)  # those that have ended, by seed
    gap: dict[str, float] | None = None  # of the engine, when all have ended; None: they are not stale
    seconds: float = 0.0  # in which they were played


@dataclass
class Playing:
    """The playing of a step's games, until they are trained on."""

    games: StepGames
    agent: Agent
    sampler: dict[str, int]  # its state before it gave their questions
    task: asyncio.Task[Rollout]
    begin: float  # of perf_counter
    rollout: Rollout | None = None  # when all have ended


class Ahead:
    """Begins the games of the next two steps, and lets them go on between micro-batches.

    Every method is called by every rank or by none, except `go_on`, which is local.
    """

    def __init__(
        self,
        config: TrainConfig,
        models: Models,
        sampler: QuestionSampler,
        ranks: Ranks,
        runner: asyncio.Runner,
        *,
        play_step: PlayStep,
        wait_for: WaitFor,
    ) -> None:
        self._config = config
        self._models = models
        self._sampler = sampler
        self._ranks = ranks
        self._runner = runner
        self._play_step = play_step
        self._wait_for = wait_for
        self.hidden = 0.0  # seconds that the update computed while games of the next step were waiting
        self.trained = StepGames(0, stale=False)  # the games that `take` returned last
        self._begun: list[Playing] = []  # of at most two steps, the earlier one first
        self._computing_since = 0.0  # of perf_counter
        self._loaded: dict[int, StepGames] = {}  # by step

    @property
    def unfinished(self) -> bool:
        """Whether weights that no longer learn are still needed to play the games of the next step."""
        return bool(self._begun) and self._begun[0].games.gap is None

    @property
    def policy(self) -> Policy:
        """The weights that play the games of the next step; those of a checkpoint are read into them."""
        return (self._begun[0].agent if self._begun else self._models.agent).policy

    def state(self) -> dict[str, int]:
        """The state of the sampler before it gave the questions of the games that have begun."""
        return self._begun[0].sampler if self._begun else self._sampler.state()

    def take(self, step: int) -> Rollout:
        """The games of a step, to be trained on now."""
        self.play(step)
        playing = self._begun.pop(0)
        assert playing.games.step == step and playing.rollout is not None
        self.trained, self.hidden = playing.games, 0.0
        self._computing_since = time.perf_counter()
        return playing.rollout

    def play(self, step: int) -> None:
        """Begin the games of a step and of the next, where they have not begun; wait for the former."""
        first = self._begun[-1].games.step + 1 if self._begun else step
        for number in range(first, min(step + 1, self._config.steps) + 1):
            if number > first:  # at the start of a run
                self._models.refresh()  # the other agent has the same weights
            self._begin(StepGames(number, stale=number > step))
        self._finish()

    def _begin(self, games: StepGames) -> None:
        """Begin games with the newest weights."""
        agent, state = self._models.agent, self._sampler.state()

        async def begin() -> None:
            task = asyncio.create_task(self._play_step(games.step, agent))
            self._begun.append(Playing(games, agent, state, task, time.perf_counter()))
            await asyncio.sleep(0)  # the task takes its questions before another one begins

        self._runner.run(begin())

    def keeping(self, play_one: PlayOne) -> PlayOne:
        """`play_one`, but a game that a checkpoint holds is not played again. Called as its step begins."""
        games = self._begun[-1].games.games

        async def play_or_reuse(question: Question, seed: str, sample: int) -> Trajectory:
            if seed not in games:
                games[seed] = await play_one(question, seed, sample)
            return games[seed]

        return play_or_reuse

    def go_on(self) -> None:
        """Let the games run until all of them wait. Called between micro-batches."""
        if any(not playing.task.done() for playing in self._begun):
            self.hidden += time.perf_counter() - self._computing_since
            self._runner.run(until_idle())
        self._computing_since = time.perf_counter()

    def _finish(self) -> None:
        """Wait until the games of the next step have ended, and score those that will be stale.

        Those of the step after it go on meanwhile. Raises Resumable, FatalEnvError or UsageError; the games
        then still count as begun.
        """
        if not self._begun or self._begun[0].rollout is not None:
            return
        playing = self._begun[0]
        games = playing.games

        async def result() -> Rollout:
            return await playing.task

        playing.rollout = self._wait_for(result())
        if games.gap is not None:  # they had ended before the checkpoint
            return
        games.seconds = time.perf_counter() - playing.begin
        if games.stale:
            trajectories = [trajectory for group in playing.rollout[1] for trajectory in group]
            differences = score(
                trajectories, playing.agent.policy, tokens_per_batch=self._config.tokens_per_batch
            )
            shares = self._ranks.gather(differences)
            games.gap = engine_gap([tokens for share in shares for tokens in share])

    def cancel(self) -> None:
        """Cancel the games that have begun."""
        begun, self._begun = self._begun, []

        async def ended() -> None:
            for playing in begun:
                playing.task.cancel()
                with suppress(BaseException):  # raised before, or nobody waits for these games any more
                    await playing.task

        self._runner.run(ended())

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's share of the games that have begun to a checkpoint."""
        if self._begun:
            path = folder / f"shard-{self._ranks.rank + 1:05d}-{FILE}"
            path.write_text(json.dumps([asdict(playing.games) for playing in self._begun]), "utf-8")

    def load(self, folder: Path) -> None:
        """Cancel the games that have begun, and read those of a checkpoint, of all ranks, for `resume`."""
        self.cancel()
        self._loaded = {}
        for path in sorted(folder.glob(f"shard-*-{FILE}")):
            for share in json.loads(path.read_text("utf-8")):
                games = {seed: _trajectory(row) for seed, row in share.pop("games").items()}
                self._loaded.setdefault(share["step"], StepGames(**share)).games.update(games)

    def resume(self) -> None:
        """Go on from the checkpoint that was loaded last.

        Games that had ended are not played again. Where others of the next step had not, the agent has the
        weights that play them; the other agent gets the newest ones.
        """
        for agent in self._models.agents:
            agent.clear_cache()
        # A run may have fewer steps than before.
        begun = [games for step, games in self._loaded.items() if step <= self._config.steps]
        for games in begun[:1]:
            self._begin(games)
        self._models.refresh()
        for games in begun[1:]:
            self._begin(games)


@torch.no_grad()
def score(trajectories: Sequence[Trajectory], policy: Policy, *, tokens_per_batch: int) -> list[Tensor]:
    """Compare the log-probabilities that the engine recorded with those of the policy that played.

    Returns the policy's minus the engine's, in nats. In float32 the policy's replace them: their last bits do
    not depend on which games decoded together, so the update does not depend on when replies came. In 16 bits
    the engine's stay, because importance weights correct for its rounding too, and one batch is enough.
    """
    exact = policy.compute.itemsize >= 4
    batches = fill(trajectories, tokens_per_batch)
    differences: list[Tensor] = []
    for batch in batches if exact else batches[:1]:
        groups = [[trajectories[number] for number in group] for group in batch]
        scored = policy(pack(groups, policy.device)).logprobs.cpu()
        recorded: list[float] = []
        for game in (game for group in groups for game in group):
            sampled = [position for position, flag in enumerate(game.sampled) if flag]
            new = scored[len(recorded) : len(recorded) + len(sampled)].tolist()
            recorded += [game.logprobs[position] for position in sampled]
            if exact:
                for position, logprob in zip(sampled, new, strict=True):
                    game.logprobs[position] = logprob
        differences.append(scored - torch.tensor(recorded))
    return differences


def _trajectory(row: dict[str, Any]) -> Trajectory:
    """A game from its JSON."""
    question = row["question"] | {"answers": tuple(row["question"]["answers"])}
    turns = [Turn(**turn | {"action": Action(**turn["action"])}) for turn in row["turns"]]
    return Trajectory(**row | {"question": Question(**question), "turns": turns})
