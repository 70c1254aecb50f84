"""The games of each step: played when they are needed, or, with `--ahead 1`, while an update computes.

θ(k) are the weights after the update of step k. With `--ahead 1` two agents take turns with them:

    learner   | update k |  wait  | update k+1 |  wait  | update k+2 |  wait  | …
    agent A     games k+1, θ(k-1) |            | games k+3, θ(k+1)            |
    agent B              | games k+2, θ(k)              |            | games k+4, θ(k+2) …

Games of step k+2 start after update k and must end before update k+2. Games and updates take turns in one
thread: between two micro-batches the games go on until all of them wait for a reply. This hides the waiting,
but no computation. They are one update old when they are trained on; importance weights
(`options.objectives`) correct for that, as in decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; for
language models AReaL, Fu et al. 2025, arXiv 2505.24298).

No games are in flight at a step that is validated or saved on schedule: those after it are played with its
weights. So a checkpoint holds no games, and a run that resumes from one ends with the same weights.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prompt_r1.agent.agent import Agent
from prompt_r1.agent.packing import fill, pack
from prompt_r1.agent.policy import Policy
from prompt_r1.training.event_loop import until_idle
from prompt_r1.training.logprob_gap import engine_gap
from prompt_r1.training.models import Models
from prompt_r1.training.run import Run
from prompt_r1.types import Trajectory

PlayStep = Callable[[int, Agent], Coroutine[None, None, list[list[Trajectory]]]]


@dataclass(frozen=True)
class Rollout:
    """This rank's games of a step."""

    trajectories_PG: list[list[Trajectory]]
    metrics: dict[str, float] = field(default_factory=dict)
    # The engine's distance from the weights that sampled, where those are no longer the policy's.
    gap: dict[str, float] | None = None


class Rollouts:
    """Plays the games of a step with the newest weights. Every method is called by every rank or by none."""

    def __init__(self, run: Run, models: Models, play_step: PlayStep) -> None:
        """`play_step` plays this rank's games of a step with an agent."""
        self.run = run
        self.models = models
        self.play_step = play_step

    def of_step(self, step: int) -> Rollout:
        """The games of a step, to be trained on now. Raises Resumable, FatalEnvError or UsageError."""
        games_PG = self.run.wait_for(self.play_step(step, self.models.agent))
        return Rollout(games_PG)

    def go_on(self) -> None:
        """Let other steps' games go on, between two micro-batches. Local: no rank waits for another."""

    def cancel(self) -> None:
        """End the games that are in flight."""


@dataclass
class InFlight:
    """The games of a step that are being played."""

    step: int
    agent: Agent
    task: asyncio.Task[list[list[Trajectory]]]
    begin: float  # of perf_counter


class OverlappedRollouts(Rollouts):
    """`--ahead 1`: begins the games of the next step before it waits for those of this one."""

    def __init__(self, run: Run, models: Models, play_step: PlayStep) -> None:
        super().__init__(run, models, play_step)
        self._in_flight: list[InFlight] = []  # of at most two steps, the earlier one first
        self._hidden = 0.0  # seconds in which the update computed while games waited
        self._computing_since = 0.0  # of perf_counter

    def of_step(self, step: int) -> Rollout:
        """The games of a step; those of the next one have begun too, unless this one is scheduled."""
        if not self._in_flight:
            self._begin(step)
        if step < self.run.config.steps and not self.run.is_scheduled(step):
            self._begin(step + 1)
        games, *self._in_flight = self._in_flight
        assert games.step == step, f"games of step {games.step} in step {step}"

        async def finished() -> list[list[Trajectory]]:
            return await games.task

        trajectories_PG = self.run.wait_for(finished())
        metrics = {"ahead/hidden": self._hidden, "ahead/seconds": time.perf_counter() - games.begin}
        gap = self._compare_with_policy(games.agent, trajectories_PG)
        self._hidden, self._computing_since = 0.0, time.perf_counter()
        return Rollout(trajectories_PG, metrics, gap)

    def _begin(self, step: int) -> None:
        """Begin the games of a step with the newest weights."""
        agent = self.models.agent

        async def begin() -> None:
            task = asyncio.create_task(self.play_step(step, agent))
            self._in_flight = [*self._in_flight, InFlight(step, agent, task, time.perf_counter())]

        self.run.runner.run(begin())

    def _compare_with_policy(
        self, agent: Agent, trajectories_PG: Sequence[Sequence[Trajectory]]
    ) -> dict[str, float]:
        """The engine's gap to the weights that played, before they are replaced."""
        trajectories = [trajectory for group in trajectories_PG for trajectory in group]
        tokens_per_batch = self.run.config.tokens_per_batch
        differences = score_again(trajectories, agent.policy, tokens_per_batch=tokens_per_batch)
        shares = self.run.ranks.gather(differences)
        return engine_gap([tokens for share in shares for tokens in share])

    def go_on(self) -> None:
        """Let the games in flight go on until all of them wait."""
        if any(not games.task.done() for games in self._in_flight):
            self._hidden += time.perf_counter() - self._computing_since
            self.run.runner.run(until_idle())
        self._computing_since = time.perf_counter()

    def cancel(self) -> None:
        """Cancel the games in flight."""
        in_flight, self._in_flight = self._in_flight, []

        async def ended() -> None:
            for games in in_flight:
                games.task.cancel()
                with suppress(BaseException):  # raised before, or nobody waits for these games any more
                    await games.task

        self.run.runner.run(ended())


def make_rollouts(run: Run, models: Models, play_step: PlayStep) -> Rollouts:
    """What plays the games of a run, by `--ahead`."""
    kind = OverlappedRollouts if run.config.ahead else Rollouts
    return kind(run, models, play_step)


@torch.no_grad()
def score_again(trajectories: Sequence[Trajectory], policy: Policy, *, tokens_per_batch: int) -> list[Tensor]:
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
