"""A task of reasoning-gym (`pip install reasoning-gym`) with its own verifier and a calculator to ask.

    python train.py --config mini --agent AGENT --data py:examples.reasoning_task:questions \
        --env py:examples.reasoning_task:Calculator --reward examples.reasoning_task:reward

reasoning-gym is by Stojanovski et al. 2025, arXiv 2505.24760.
"""

import re
from collections.abc import Iterator
from typing import Any

from prompt_r1.types import Message, Reward, Trajectory

TASK = "chain_sum"
SETTINGS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2}
SIZES = {"train": 1_000, "validation": 100, "test": 200}
SEEDS_OF_A_SPLIT = 1_000_000


def questions(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a split. No two splits share a seed, and no question of training is in another split."""
    held_out = set()
    if split == "train":
        held_out = {row["question"] for other in ("validation", "test") for row in questions(other, seed)}
    first_seed = (seed * len(SIZES) + list(SIZES).index(split)) * SEEDS_OF_A_SPLIT
    for index, entry in enumerate(dataset_of(first_seed, SIZES[split])):
        if entry["question"] not in held_out:
            yield {
                "id": f"{TASK}/{first_seed}/{index}",
                "dataset": TASK,
                "question": entry["question"],
                "answer": entry["answer"],
                "entry": entry,
            }


def reward(game: Trajectory, paper: Reward) -> float:
    """The reward of the paper, with the score of the task's own verifier (0 to 1) in place of F1."""
    if not paper.gate_is_open:
        return paper.total
    score = dataset_of(seed=0, size=1).score_answer(answer=game.answer, entry=game.question.extra["entry"])
    return paper.total - paper.answer + score


def dataset_of(seed: int, size: int) -> Any:
    """The task as its package makes it; an entry has a question, an answer and metadata."""
    import reasoning_gym

    return reasoning_gym.create_dataset(TASK, seed=seed, size=size, **SETTINGS)


class Calculator:
    """An environment that computes one operation on two integers."""

    def ask(self, messages: list[Message]) -> str:
        asked = re.fullmatch(r"(-?\d+) ([+*-]) (-?\d+)", messages[-1]["content"].strip())
        if asked is None:
            return "I need one operation on two numbers."
        left, right = int(asked[1]), int(asked[3])
        result = {"+": left + right, "-": left - right, "*": left * right}[asked[2]]
        return f"It is {result} then."
