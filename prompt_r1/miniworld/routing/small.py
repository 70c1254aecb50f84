"""`mini-small`: a cheap environment for some questions only.

It has the facts of `mini` and its words, but cannot reason:

| question                                          | reply of `mini-small`                      |
|---------------------------------------------------|--------------------------------------------|
| one fact (director, year, …)                      | the same as that of `mini`                 |
| a summary with genre, hero and director           | the same                                   |
| a casual or vague question                        | the same: the fact that was meant, or not  |
| a sum                                             | right with 0.1                             |
| whether a film was released before a year         | yes or no, by luck                         |
| two relations, two films or two sums at once      | wrong, or no answer                        |
"""

from dataclasses import replace

from prompt_r1.miniworld.beliefs import SKILLS, Skills
from prompt_r1.miniworld.environment import ANSWER_ONLY, MiniEnvironment, MiniReply
from prompt_r1.miniworld.understanding import BeforeYear, understand
from prompt_r1.miniworld.world import World

SMALL = replace(SKILLS["A"], sum=0.1, hops=0.0, compare=0.0, problem=0.0)
COIN = replace(SMALL, clear=0.5)


class SmallEnvironment(MiniEnvironment):
    """The mini environment without reasoning."""

    def __init__(self, world: World, *, seed: int | str = 0) -> None:
        super().__init__(world, "A", seed=seed)
        self.name = "mini-small"

    def reply(self, prompt: str, skills: Skills | None = None) -> MiniReply:
        """Reply to a prompt; a question about a year is answered with a skill of its own."""
        compares = isinstance(understand(ANSWER_ONLY.sub("", prompt), self.world), BeforeYear)
        return super().reply(prompt, skills or (COIN if compares else SMALL))
