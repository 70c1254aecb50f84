"""`--ahead 1`: while the update of a step computes, the games of the next step are played.

θ(k) are the weights after the update of step k.

    agent     | games k+1, played with θ(k-1)          | refresh | games k+2, played with θ(k)       | …
    learner   | update k: θ(k-1) → θ(k)   | wait, score |         | update k+1: θ(k) → θ(k+1) | …

Games and update take turns in one thread: between two micro-batches the games go on until all of them wait
for a reply. This hides the waiting, but no computation. Validation and checkpoint come after the refresh,
when no game is being played.

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


class WaitFor(Protocol):
    """`Run.wait_for`, of a rollout."""

    def __call__(self, work: Coroutine[None, None, Rollout]) -> Rollout: ...


@dataclass
class StepGames:
    """The games of a step: being played, or finished."""

    step: int
    stale: bool  # an update comes between them and their own
    games: dict[str, Trajectory] = field(default_factory=dict)  # those that have ended, by seed
    gap: dict[str, float] | None = None  # of the engine, when all have ended; None: they are not stale
    seconds: float = 0.0  # in which they were played


class Ahead:
    """Begins the games of the next step, and lets them go on between micro-batches.

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
        play_step: Callable[[int], Coroutine[None, None, Rollout]],
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
        self._next: StepGames | None = None  # those that have begun
        self._task: asyncio.Task[Rollout] | None = None  # plays them
        self._rollout: Rollout | None = None  # its result
        self._begin = self._computing_since = 0.0  # of perf_counter
        self._before: dict[str, int] = {}  # the sampler's state before the next ones
        self._loaded: StepGames | None = None

    @property
    def unfinished(self) -> bool:
        """Whether games have begun and not ended: then the agent still needs the weights that began them."""
        return self._next is not None and self._next.gap is None

    @property
    def policy(self) -> Policy:
        """The weights that play."""
        return self._models.agent.policy

    def state(self) -> dict[str, int]:
        """The state of the sampler before it gave the questions of the games that have begun."""
        return self._before if self._next else self._sampler.state()

    def take(self, step: int) -> Rollout:
        """The games of a step, to be trained on now; those of the next step begin."""
        if self._next is None:
            self._start(StepGames(step, stale=False))
        self.finish()
        rollout = self._rollout
        assert rollout is not None and self._next is not None and self._next.step == step
        self.trained, self._next, self.hidden = self._next, None, 0.0
        if step < self._config.steps:
            self._start(StepGames(step + 1, stale=True))
        return rollout

    def _start(self, games: StepGames) -> None:
        self._next, self._rollout, self._before = games, None, self._sampler.state()
        self._begin = self._computing_since = time.perf_counter()

        async def start() -> None:
            self._task = asyncio.create_task(self._play_step(games.step))

        self._runner.run(start())

    def keeping(self, play_one: PlayOne) -> PlayOne:
        """`play_one`, but a game that a checkpoint holds is not played again."""

        async def play_or_reuse(question: Question, seed: str, sample: int) -> Trajectory:
            assert self._next is not None
            games = self._next.games
            if seed not in games:
                games[seed] = await play_one(question, seed, sample)
            return games[seed]

        return play_or_reuse

    def go_on(self) -> None:
        """Let the games run until all of them wait. Called between micro-batches."""
        if self._task is not None and not self._task.done():
            self.hidden += time.perf_counter() - self._computing_since
            self._runner.run(until_idle())
            self._computing_since = time.perf_counter()

    def finish(self) -> None:
        """Wait until the games that have begun have ended, and score those that will be stale.

        Raises Resumable, FatalEnvError or UsageError; the games then still count as begun.
        """
        games, task = self._next, self._task
        if games is None or task is None or self._rollout is not None:
            return

        async def result() -> Rollout:
            return await task

        self._rollout = self._wait_for(result())
        if games.gap is not None:  # they had ended before the checkpoint
            return
        games.seconds = time.perf_counter() - self._begin
        if games.stale:
            trajectories = [trajectory for group in self._rollout[1] for trajectory in group]
            differences = score(trajectories, self.policy, tokens_per_batch=self._config.tokens_per_batch)
            shares = self._ranks.gather(differences)
            games.gap = engine_gap([tokens for share in shares for tokens in share])

    def cancel(self) -> None:
        """Cancel the games that have begun."""
        task = self._task

        async def ended() -> None:
            if task is not None:
                task.cancel()
                with suppress(BaseException):  # raised before, or nobody waits for these games any more
                    await task

        self._runner.run(ended())

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's share of the games that have begun to a checkpoint."""
        if self._next is not None:
            path = folder / f"shard-{self._ranks.rank + 1:05d}-{FILE}"
            path.write_text(json.dumps(asdict(self._next)), "utf-8")

    def load(self, folder: Path) -> None:
        """Read the games of all ranks from a checkpoint, for `resume`."""
        self._loaded = None
        for path in sorted(folder.glob(f"shard-*-{FILE}")):
            share = json.loads(path.read_text("utf-8"))
            games = {seed: _trajectory(row) for seed, row in share.pop("games").items()}
            self._loaded = self._loaded or StepGames(**share)
            self._loaded.games |= games

    def resume(self) -> None:
        """Go on from the checkpoint that was loaded last.

        Games that had ended are not played again. Where others had not, the agent has the weights that play.
        """
        self.cancel()
        games, self._next, self._task = self._loaded, None, None
        if games is not None and games.step > self._config.steps:  # the run is to end here now
            games = None
        if games is None or games.gap is not None:
            self._models.refresh()
        self._models.agent.clear_cache()
        if games is not None:
            self._start(games)


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
