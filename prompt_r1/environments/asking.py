"""How an environment is asked for the answer itself, without an agent, and how the answer is read.

All evaluations, and the test at the end of a training, ask in this way.
"""

from prompt_r1.environments.specs import is_mini
from prompt_r1.miniworld.environment import ANSWER_ONLY
from prompt_r1.settings.agent import ANSWER_IN_TAGS, names_of

IN_TAGS = f"\n{ANSWER_IN_TAGS}"  # the request after the question


def request_of(spec: str) -> str:
    """The request for an answer, after the question, to the environment of a SPEC.

    The mini world understands only ANSWER_ONLY. If a SPEC also names a real model, the answer is asked for in
    tags.
    """
    return ANSWER_ONLY if all(is_mini(name) for name in names_of(spec)) else IN_TAGS


def read_answer(reply: str, request: str) -> tuple[str, float | None]:
    """The answer in a reply, and its format: 1 with the requested tags, 0 without them.

    If no tags were requested, the format is None. If tags were requested, the answer is the content of the
    last tags. If the reply has no tags, the answer is the whole reply.
    """
    if request != IN_TAGS:
        return reply.strip(), None
    answer = last_between(reply, "<answer>", "</answer>")
    return (reply.strip(), 0.0) if answer is None else (answer, 1.0)


def last_between(text: str, opening: str, closing: str) -> str | None:
    """What the last pair of `opening` and `closing` encloses; None without a pair.

    The last pair counts, because a model may write about the tags before it uses them.
    """
    before_end, _, _ = text.rpartition(closing)
    _, found, inside = before_end.rpartition(opening)
    if not found:
        return None
    inside, _, _ = inside.partition(closing)  # The closing tag may stand twice.
    return inside.strip()
