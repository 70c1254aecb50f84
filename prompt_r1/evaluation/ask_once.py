"""The methods that ask the environment without an agent.

There are two:

    direct   asks the question itself, in one call
    cot      adds "Let's think step by step.", and asks for the answer in a second call (zero-shot, Kojima et
             al. 2022)

The name of the environment decides how it is asked for the answer: in tags, or not (`request_of`).
"""

from dataclasses import replace

from prompt_r1.environments.asking import read_answer, request_of
from prompt_r1.environments.budget import Bill
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import Caller
from prompt_r1.errors import EnvError
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.miniworld.environment import REQUEST_OF_COT
from prompt_r1.protocol import shown_reply
from prompt_r1.types import Message, Question

STEP_BY_STEP = "Let's think step by step."
EXTRACT = f"{REQUEST_OF_COT} …"


async def ask_once(
    environment: Environment, system: System, messages: list[Message], question: Question, sample: int
) -> Prediction:
    """Answer a question with one call. A failed call gives a prediction with an error."""
    bill = Bill()
    try:
        reply = await environment.ask(messages, Caller(question.id, sample), bill)
    except EnvError as error:
        return Prediction(
            system, question, sample, None, stop="env_error", error=str(error), spent=bill.spent
        )
    answer, formatted = read_answer(reply.text, request_of(environment.name))
    return Prediction(system, question, sample, answer, reply.text, format=formatted, spent=bill.spent)


async def direct(
    environment: Environment, system: System, question: Question, sample: int, *, prompt: str | None = None
) -> Prediction:
    """Ask the environment the question itself, under the system message `prompt`."""
    messages: list[Message] = []
    if prompt is not None:
        messages.append({"role": "system", "content": prompt})
    messages.append({"role": "user", "content": question.text + request_of(environment.name)})
    return await ask_once(environment, system, messages, question, sample)


async def think_then_answer(
    environment: Environment, system: System, question: Question, sample: int
) -> Prediction:
    """Ask for reasoning. Then ask, in a second call, for the answer that the reasoning leads to."""
    messages: list[Message] = [{"role": "user", "content": f"{question.text}\n{STEP_BY_STEP}"}]
    thought = await ask_once(environment, system, messages, question, sample)
    if thought.error:
        return thought
    messages.append({"role": "assistant", "content": shown_reply(thought.raw)})
    request = request_of(environment.name).strip()
    messages.append({"role": "user", "content": f"{EXTRACT}\n{request}"})
    answered = await ask_once(environment, system, messages, question, sample)
    raw = f"{thought.raw}\n\n{answered.raw}"
    return replace(answered, raw=raw, spent=thought.spent + answered.spent)
