"""Environments of one's own, for --env py:tests.support.own_environments:NAME."""

from prompt_r1.environments.sources import Caller
from prompt_r1.errors import FatalEnvError
from prompt_r1.types import Message


class ByCaller:
    """Replies that differ from game to game."""

    async def ask(self, messages: list[Message], caller: Caller) -> str:
        return f"Anna, says {caller.question} in game {caller.sample} after {len(messages)} messages."


class Unauthorized:
    """Rejects every call."""

    async def ask(self, messages: list[Message]) -> str:
        raise FatalEnvError("invalid key")
