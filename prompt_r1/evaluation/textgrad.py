"""`textgrad` (Yuksekgonul et al. 2024): a model criticises and rewrites the prompt.

Each update uses 3 training questions. It makes 3 calls of the environment and 7 of the optimiser: two for
each question (criticism of the answer, then of the prompt), and one to rewrite the prompt. The new prompt is
kept if it scores at least as high on the validation questions. To score a prompt takes one call for each
validation question. The seed prompt is scored once, too.

With a limit of calls (--optimize-calls), updates go on as long as they stay within it. Without one (0), there
are 3 epochs of 4 updates.
"""

import random
from collections.abc import Iterator, Sequence

from prompt_r1.environments.asking import last_between
from prompt_r1.evaluation.searches import SEED_PROMPT, VALIDATED_ON, Algorithm, Data, PromptSearch, task_score
from prompt_r1.rollout import run_together
from prompt_r1.types import Question

EPOCHS = 3
UPDATES = 4  # updates in an epoch
BATCH = 3  # training questions of an update
UPDATE_CALLS = 2 * BATCH + 1  # calls of the optimiser in an update
OPENING, CLOSING = "<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"

CRITIC = """\
You are part of a system that improves texts step by step. Say what is wrong with the text that you are \
asked about and how it could reach the goal better. Criticise only: do not write a new version. If it is \
already perfect, say so and nothing else."""
WRITER = f"""\
You are part of a system that improves texts step by step. You get a text, its role and criticism of it, and \
write a better version that keeps what works. Put it between {OPENING} and {CLOSING}."""


async def textgrad(search: PromptSearch, data: Data) -> str:
    """The last prompt that validation did not reject."""
    await search.begin(data.validation, VALIDATED_ON)
    batches = endless_batches(data.train, random.Random(f"textgrad {search.seed}"))
    prompt = SEED_PROMPT
    step_calls = BATCH + UPDATE_CALLS + len(search.questions)
    update = 0
    while search.may_go_on(step_calls, authors_stop=update == EPOCHS * UPDATES):
        update += 1
        proposed = await rewrite(search, prompt, next(batches), update)
        if await search.score(proposed) >= await search.score(prompt):
            prompt = proposed
    return prompt


TEXTGRAD = Algorithm(
    textgrad,
    authors_calls=VALIDATED_ON + EPOCHS * UPDATES * (BATCH + UPDATE_CALLS + VALIDATED_ON),
    optimizer_share=UPDATE_CALLS / (BATCH + UPDATE_CALLS + VALIDATED_ON),
    optimizer_fields={"temperature": 0.0, "max_tokens": 2000},
)


def endless_batches(train: Sequence[Question], rng: random.Random) -> Iterator[list[Question]]:
    """Batches of one epoch after another, without end.

    Each epoch shuffles the training questions, and takes its first UPDATES batches.
    """
    while True:
        order = rng.sample(list(train), len(train))[: UPDATES * BATCH]
        for start in range(0, len(order), BATCH):
            yield order[start : start + BATCH]


async def rewrite(search: PromptSearch, prompt: str, batch: Sequence[Question], update: int) -> str:
    """Rewrite the prompt after criticism of its answers to a batch. `update` is the number of the update.

    If the reply has no tags, the prompt stays as it is. The criticisms are concatenated, not summarised.
    """
    first = update * UPDATE_CALLS  # the number of this update's first request to the optimiser

    async def criticise(question: Question, sample: int) -> str:
        [prediction] = await search.try_prompt(prompt, [question])
        exchange = f"<LM_INPUT>{question.text}</LM_INPUT>\n<LM_OUTPUT>{prediction.raw}</LM_OUTPUT>"
        answer_critique = await search.ask_optimizer(
            CRITIC,
            f"A language model was asked and answered:\n{exchange}\n"
            f"The right answer is {question.answers[0]!r}; compared with it the answer scores "
            f"{task_score(prediction):.2f} of 1. Criticise the answer.",
            sample=sample,
        )
        exchange_with_prompt = f"<LM_SYSTEM_PROMPT>{prompt}</LM_SYSTEM_PROMPT>\n{exchange}"
        prompt_critique = await search.ask_optimizer(
            CRITIC,
            "A language model was asked and answered under this system message:\n"
            f"{exchange_with_prompt}\nOf its answer it was said:\n"
            f"<FEEDBACK>{answer_critique.text}</FEEDBACK>\n"
            "Criticise the system message: what about it should change so that such answers get better?",
            sample=sample + 1,
        )
        return f"{exchange_with_prompt}\n<FEEDBACK>{prompt_critique.text}</FEEDBACK>"

    criticisms = await run_together(
        criticise(question, first + 2 * number) for number, question in enumerate(batch)
    )
    parts = [
        "The text is the system message of a language model that answers questions. Now it is:",
        f"<VARIABLE>{prompt}</VARIABLE>",
        "What it led to, and what was said of it:",
        *criticisms,
        f"Write the better version between {OPENING} and {CLOSING}.",
    ]
    reply = await search.ask_optimizer(WRITER, "\n\n".join(parts), sample=first + UPDATE_CALLS - 1)
    return last_between(reply.text, OPENING, CLOSING) or prompt
