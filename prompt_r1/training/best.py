"""Which agent of a run is the best so far. RUN/agent holds it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """An agent that may be the best of its run."""

    step: int  # its last training step; 0: the untrained agent
    em: float | None  # EM in validation; None: no validation has judged the agent
    reward: float  # mean reward in validation

    def is_better_than(self, best: "Candidate | None", *, reward_first: bool) -> bool:
        """Whether this agent is better than the best of the earlier agents (None: there is none).

        Higher EM wins. If EM is equal, higher reward wins. With `reward_first`, reward decides before EM. Of
        equal agents the first stays the best: a later agent may have collapsed. While no validation has
        judged an agent, the newest trained agent counts as the best.
        """
        if self.em is None:
            if best is None:
                return self.step > 0
            return best.em is None and best.step < self.step
        if best is None or best.em is None:
            return True
        if reward_first:
            return (self.reward, self.em) > (best.reward, best.em)
        return (self.em, self.reward) > (best.em, best.reward)


def candidate_of(metrics: Mapping[str, float]) -> Candidate:
    """The agent of a step, by the step's line in metrics.jsonl."""
    return Candidate(int(metrics["step"]), _em_of(metrics), reward=metrics.get("val/reward", 0.0))


def _em_of(metrics: Mapping[str, float]) -> float | None:
    """EM in the validation of a step, in which the games that the environment broke count as wrong.

    None: there was no validation, or every game broke. Games of hard questions make more calls, so they
    break more often. val/em leaves them out. If val/em decided, then after an outage an agent that answered
    only the easy questions could become the best.
    """
    if "val/em" not in metrics:
        return None
    intact, broken = metrics["val/n"], metrics["val/errors"]
    right = round(metrics["val/em"] * intact)  # The log rounds val/em to six digits.
    return right / (intact + broken)
