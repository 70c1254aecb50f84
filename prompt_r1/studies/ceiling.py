"""The best static prompt of `mini-advice`, by exhaustive search.

A prompt acts on an answer only through the skills that its advice gives, so the shortest prompt of each
combination stands for all prompts with the same advice, and longer ones are never better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from prompt_r1.baselines.ask_once import task_score
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.miniworld.advice import AdvisedEnvironment, advised, every_prompt, find_advice
from prompt_r1.miniworld.beliefs import Skills
from prompt_r1.types import Question

# The skills that the reply to a question of each kind depends on, besides `bare`.
SKILLS_USED = {
    "bridge": ("hops",),
    "compare": ("compare",),
    "pop": ("casual", "clear"),
    "math": ("problem",),
    "gen": ("details",),
}


@dataclass(frozen=True)
class PromptScores:
    """The score of each question under each prompt: EM, or F1 for free texts."""

    prompts: Sequence[str]
    questions: Sequence[Question]
    scores: NDArray[np.float32]  # (prompts, questions)

    def best(self, datasets: Sequence[str]) -> str:
        """The prompt with the best mean over the questions of some datasets; the first of equals."""
        chosen = [question.dataset in datasets for question in self.questions]
        return self.prompts[int(self.scores[:, chosen].mean(axis=1).argmax())]

    def of(self, prompt: str, datasets: Sequence[str]) -> dict[str, float]:
        """The score of each question of some datasets under a prompt, by the question's id."""
        row = self.scores[self.prompts.index(prompt)]
        pairs = zip(self.questions, row, strict=True)
        return {question.id: float(score) for question, score in pairs if question.dataset in datasets}


@cache
def every_state() -> Mapping[Skills, str]:
    """All skills that advice can give, each with the first prompt that gives them."""
    states: dict[Skills, str] = {}
    for prompt in every_prompt():
        states.setdefault(advised(find_advice(prompt)), prompt)
    return states


def score_every_prompt(environment: AdvisedEnvironment, questions: Sequence[Question]) -> PromptScores:
    """Score all combinations of advice on questions of the mini world."""
    states = list(every_state())
    bare = np.array([skills.bare for skills in states])
    scores = np.empty((len(states), len(questions)), dtype=np.float32)
    for number, question in enumerate(questions):
        asked = f"{question.text} Answer only."  # as the compared methods ask the mini world
        firsts, group_of = _groups(question.dataset.removesuffix("_ood"))
        forms = []
        for obeyed in (0.0, 1.0):
            one_of_each = [replace(states[first], bare=obeyed) for first in firsts]
            replies = [environment.reply_with(asked, skills).text.strip() for skills in one_of_each]
            found = [task_score(Prediction(question, reply)) for reply in replies]
            forms.append(np.array(found)[group_of])
        scores[:, number] = np.where(bare > environment.luck_of_form(asked), forms[1], forms[0])
    return PromptScores(list(every_state().values()), questions, scores)


@cache
def _groups(kind: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """States grouped by the skills that a kind uses: the first of each group, and the group of each state."""
    values = np.array([[getattr(skills, name) for name in SKILLS_USED[kind]] for skills in every_state()])
    _, firsts, group_of = np.unique(values, axis=0, return_index=True, return_inverse=True)
    return firsts, group_of.ravel()
