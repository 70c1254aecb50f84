"""The embedded default: a small world in which the whole method runs on a laptop within minutes.

Its agent, which needs torch, is in `miniworld.agent`: what is here serves the environment without.
"""

from prompt_r1.miniworld.environment import MiniEnvironment, MuteEnvironment
from prompt_r1.miniworld.questions import MiniWorld, make_questions, mini_world
from prompt_r1.miniworld.world import World, make_world

__all__ = [
    "MiniEnvironment",
    "MiniWorld",
    "MuteEnvironment",
    "World",
    "make_questions",
    "make_world",
    "mini_world",
]
