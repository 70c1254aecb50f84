"""`textgrad` (Yuksekgonul et al. 2024): a model criticises the answers, then the prompt in the light of that,
then rewrites the prompt.

3 epochs of 4 updates, each on 3 training questions. An update takes 3 calls of the environment and, of the
optimiser, 2 for each question (criticism of the answer, criticism of the prompt) and one to rewrite: 10.
After it the new prompt is kept only if it is not worse on the validation questions, which takes one call each
(and once for the seed prompt); without validation the last prompt wins, whatever it is, as in the authors'
default.
"""

import asyncio
import random
from collections.abc import Sequence

from prompt_r1.baselines.optimise import Bench, Trial, between, chosen, mean_score
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

OPENING, CLOSING = "<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>"
ATTEMPTS = 2  # at a rewrite, when its tags are missing; then the prompt stays

CRITIC = """\
You are part of a system that improves texts step by step. Say what is wrong with the text that you are \
asked about and how it could reach the goal better. Criticise only: do not write a new version. If it is \
already perfect, say so and nothing else."""
WRITER = f"""\
You are part of a system that improves texts step by step. You get a text, its role and criticism of it, and \
write a better version that keeps what works. Put it between {OPENING} and {CLOSING}."""


async def textgrad(
    bench: Bench,
    train: Sequence[Question],
    validation: Sequence[Question],
    *,
    seed_prompt: str,
    epochs: int = 3,
    updates: int = 4,
    batch_size: int = 3,
    short_value: int = 10,
    validation_limit: int = 50,
    seed: int = 42,
) -> str:
    """The last prompt that validation did not reject.

    `short_value`: of a longer prompt the rewriter sees so many words at each end, as in the original; 0: all.
    `validation_limit`: so many validation questions are used; 0: no validation.
    """
    if not train or (validation_limit and not validation):
        raise UsageError("textgrad needs training and validation questions: give --train-data and --val-data")
    rng = random.Random(f"textgrad {seed}")
    held_out = chosen(validation, validation_limit, seed)
    prompt = seed_prompt
    best = mean_score(await bench.trials(prompt, held_out)) if held_out else 0.0
    bench.record(epoch=0, update=0, prompt=prompt, validation=best)
    for epoch in range(1, epochs + 1):
        order = rng.sample(list(train), len(train))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        for number, batch in enumerate(batches[:updates], start=1):
            if not bench.affords(3 * len(batch) + 1 + len(held_out)):
                return prompt
            proposed = await update(bench, prompt, batch, short_value=short_value)
            value = mean_score(await bench.trials(proposed, held_out)) if held_out else 0.0
            kept = value >= best
            bench.record(epoch=epoch, update=number, prompt=proposed, validation=value, kept=kept)
            if kept:
                prompt, best = proposed, value
    return prompt


async def update(bench: Bench, prompt: str, batch: Sequence[Question], *, short_value: int) -> str:
    """The rewritten prompt. The criticisms are put one after the other: nothing sums them up."""

    async def gradient(question: Question) -> str:
        trial = await bench.trial(prompt, question)
        of_reply = await bench.write(CRITIC, criticise_reply(trial))
        of_prompt = await bench.write(CRITIC, criticise_prompt(prompt, trial, of_reply))
        return f"{conversation(trial)}\n<FEEDBACK>{of_prompt}</FEEDBACK>"

    gradients = await asyncio.gather(*map(gradient, batch))
    shown = shortened(prompt, short_value)
    request = "\n\n".join([
        "The text is the system message of a language model that answers questions. Now it is:",
        f"<VARIABLE>{shown}</VARIABLE>",
        "What it led to, and what was said of it:",
        *gradients,
        f"Write the better version between {OPENING} and {CLOSING}.",
    ])  # fmt: skip
    for attempt in range(ATTEMPTS):
        improved = between(await bench.write(WRITER, request, sample=attempt), OPENING, CLOSING)
        if improved:
            return improved
    return prompt


def conversation(trial: Trial) -> str:
    """Question and reply in the tags of TextGrad's prompts."""
    return f"<LM_INPUT>{trial.question.text}</LM_INPUT>\n<LM_OUTPUT>{trial.reply}</LM_OUTPUT>"


def criticise_reply(trial: Trial) -> str:
    """The first step backwards: from the score to the answer."""
    return (
        f"A language model was asked and answered:\n{conversation(trial)}\n"
        f"The right answer is {trial.question.answers[0]!r}; compared with it the answer scores "
        f"{trial.score:.2f} of 1. Criticise the answer."
    )


def criticise_prompt(prompt: str, trial: Trial, of_reply: str) -> str:
    """The second: from the criticism of the answer to the prompt."""
    return (
        f"A language model worked under this system message:\n<LM_SYSTEM_PROMPT>{prompt}</LM_SYSTEM_PROMPT>\n"
        f"{conversation(trial)}\nOf its answer it was said:\n<FEEDBACK>{of_reply}</FEEDBACK>\n"
        "Criticise the system message: what about it should change so that such answers get better?"
    )


def shortened(text: str, words: int) -> str:
    """The first and the last `words` words of a text that has more than both."""
    parts = text.split()
    if not words or len(parts) <= 2 * words:
        return text
    return " ".join([*parts[:words], "(...)", *parts[-words:]])
