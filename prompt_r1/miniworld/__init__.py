"""The embedded default: a small world in which the whole method runs on a laptop within minutes."""

from prompt_r1.miniworld.agent import build_agent, mini_agent
from prompt_r1.miniworld.environment import MiniEnvironment, MuteEnvironment
from prompt_r1.miniworld.questions import MiniWorld, make_questions, mini_world
from prompt_r1.miniworld.world import World, make_world

__all__ = [
    "MiniEnvironment",
    "MiniWorld",
    "MuteEnvironment",
    "World",
    "build_agent",
    "make_questions",
    "make_world",
    "mini_agent",
    "mini_world",
]
