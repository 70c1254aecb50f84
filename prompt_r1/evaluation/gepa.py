"""`gepa` (Agrawal et al. 2025): prompts evolve from a Pareto front.

Each iteration draws a parent from the prompts that are best on some validation question, runs it on 3
training questions, lets the optimiser rewrite it in view of the errors, and runs the child on the same 3. A
child that scores higher there is scored on all validation questions and joins the pool. The prompt with the
best mean validation score wins.

Calls: one per validation question for the seed prompt; per iteration 6 of the environment and 1 of the
optimiser (3 and none if the parent is perfect), and one per validation question for a child that joins. As in
the original, 150 calls are checked before an iteration, which may exceed them; a limit is never exceeded.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from prompt_r1.evaluation.ask_once import task_score
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.evaluation.searches import VALIDATED_ON, PromptSearch, mean_score
from prompt_r1.types import Question

BATCH, METRIC_CALLS = 3, 150  # training questions of an iteration, calls of the environment
FENCE = "```"
ROLE = "You improve the instructions of language models."
REQUEST = """\
An assistant works under this instruction:
```
{prompt}
```
Tasks that it was given, what it replied, and what was to be said about it:

{cases}

Write a better instruction. Work out from the tasks what is asked for and in which form; keep every fact \
about their subject that a future task may need, and every strategy that is of use beyond one task. Write \
the new instruction, and nothing else, between ``` and ```."""


async def gepa(search: PromptSearch, train: Sequence[Question], validation: Sequence[Question]) -> str:
    """The prompt with the best mean score on the validation questions; the first of equals."""
    held_out = await search.begin(validation, VALIDATED_ON)
    rng = random.Random(search.seed)
    batches = minibatches(train, rng)
    while search.takes_step(2 * BATCH + 1 + len(held_out), ended=search.asked >= METRIC_CALLS):
        parent, batch = draw_parent(search.scores, rng), next(batches)
        before = await search.try_prompt(parent, batch)
        if mean_score(before) == 1:
            continue
        reply = await search.ask_optimizer(ROLE, reflection(parent, before), sample=search.steps)
        child = read_fenced_prompt(reply)
        after = await search.try_prompt(child, batch)
        if mean_score(after) > mean_score(before):
            await search.score(child, held_out)
    return search.best()


def draw_parent(pool: Mapping[str, Sequence[float]], rng: random.Random) -> str:
    """Draw from the Pareto front, in proportion to the validation questions on which a prompt is best.

    `pool`: prompt → its scores. A prompt is dropped if on each of its questions another remaining one does as
    well, starting with the lowest mean.
    """
    # For each validation question, the prompts that are best on it.
    columns = [dict(zip(pool, column, strict=True)) for column in zip(*pool.values(), strict=True)]
    fronts = [[prompt for prompt in pool if column[prompt] == max(column.values())] for column in columns]
    for dropped in sorted(pool, key=lambda prompt: sum(pool[prompt])):
        if all(len(front) > 1 for front in fronts if dropped in front):
            fronts = [[prompt for prompt in front if prompt != dropped] for front in fronts]
    return rng.choice([prompt for front in fronts for prompt in front])


def minibatches(questions: Sequence[Question], rng: random.Random) -> Iterator[list[Question]]:
    """Endless shuffled epochs; the last batch of an epoch is filled up with the questions that came last."""
    while True:
        order = rng.sample(list(questions), len(questions))
        order += (order[::-1] * BATCH)[: -len(order) % BATCH]
        yield from (order[start : start + BATCH] for start in range(0, len(order), BATCH))


def reflection(prompt: str, predictions: Sequence[Prediction]) -> str:
    """The optimiser's request about a minibatch. Feedback is the score; no model is involved."""
    cases = []
    for number, prediction in enumerate(predictions, start=1):
        score, gold = task_score(prediction), prediction.question.answers[0]
        feedback = f"This answer is not right (score {score:.2f} of 1). The right answer is {gold!r}."
        cases.append(
            f"# Example {number}\n## Inputs\n{prediction.question.text}\n## Generated Outputs\n"
            f"{prediction.raw}\n## Feedback\n{'This answer is right.' if score == 1 else feedback}"
        )
    return REQUEST.format(prompt=prompt, cases="\n\n".join(cases))


def read_fenced_prompt(reply: str) -> str:
    """The text between the first and the last fence, without a language's name; else the whole reply."""
    inside = reply.partition(FENCE)[2].rpartition(FENCE)[0]
    return re.sub(r"^\S*\n", "", inside).strip() or reply.replace(FENCE, "").strip()
