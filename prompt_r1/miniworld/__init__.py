"""A small synthetic world in which the whole method runs on a laptop within minutes: the embedded default.

Nothing imported here needs torch; the agent, which does, is in `miniworld.agent`.
"""

from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.world import World, make_questions, make_world, mini_questions

__all__ = ["MiniEnvironment", "World", "make_questions", "make_world", "mini_questions"]
