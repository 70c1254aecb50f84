"""Which of several environments a question asks: `--route`."""

import random

from prompt_r1.environments.sources import Caller
from prompt_r1.errors import UsageError


class Route:
    """Draws one of `count` environments for a question. Raises UsageError for any but these routes:

        session   draw an environment for each question, the same in every epoch (the paper's word, eq. 18)
        uniform   draw an environment for each question anew in each epoch, all with the same probability
        3,1,…     like uniform, with these weights

    All games of a group ask the same environment (eqs 18-19), because training compares them. So a game is
    never moved to another environment. A resumed run draws the same environments again.
    """

    def __init__(self, text: str, count: int) -> None:
        self._same_in_every_epoch = text == "session"
        weights = [1.0] * count
        if text not in ("session", "uniform"):
            try:
                weights = [float(part) for part in text.split(",")]
            except ValueError:
                weights = []
        if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise UsageError(f"--route takes session, uniform or {count} weights (such as 3,1), not {text!r}")
        self._weights = weights

    def draw(self, caller: Caller) -> int:
        """The number of the caller's environment, from 0."""
        # The run's seed is no part of this seed, so a question gets the same environment in every run.
        seed = caller.question if self._same_in_every_epoch else f"{caller.question}/{caller.epoch}"
        return random.Random(seed).choices(range(len(self._weights)), self._weights)[0]
