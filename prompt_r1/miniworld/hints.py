"""Hints for questions that a mini agent cannot answer."""

from prompt_r1.miniworld.questions import Slots, make_questions
from prompt_r1.miniworld.understanding import understand
from prompt_r1.miniworld.world import make_world


def hint(question: str, seed: int) -> str:
    """What an agent of the mini world of `seed` knows, with examples; "" for a question that it knows."""
    world = make_world(seed)
    if isinstance(understand(question, world), Slots):
        return ""
    examples: dict[str, str] = {}  # by kind
    for example in make_questions(world, "test", 40, seed):
        examples.setdefault(example.slots.kind, f"  {example.question.text}")
    about = (
        f"This agent knows only the films and people of the mini world of seed {seed}, and word\n"
        "problems. To any other question, or other wording, its answer means nothing. It knows:"
    )
    return "\n".join([about, *examples.values()])
