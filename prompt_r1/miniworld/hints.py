"""What to tell a user whose question an agent of the mini world cannot know anything about."""

from prompt_r1.miniworld.questions import Bridge, Compare, Gen, Pop, Problem, make_questions
from prompt_r1.miniworld.understanding import understand
from prompt_r1.miniworld.world import make_world

KINDS = (Bridge, Compare, Pop, Problem, Gen)


def hint(question: str, seed: int) -> str:
    """What an agent of the mini world of `seed` knows, with examples; "" for a question that it knows."""
    world = make_world(seed)
    if isinstance(understand(question, world), KINDS):
        return ""
    examples, seen = [], set()
    for example in make_questions(world, "test", 40, seed):
        kind = example.slots.kind
        if kind not in seen:
            seen.add(kind)
            examples.append(f"  {example.question.text}")
    return "\n".join(
        [
            f"This agent knows only the films and people of the mini world of seed {seed}, and word",
            "problems. To any other question, or other wording, its answer means nothing. It knows:",
            *examples,
        ]
    )
