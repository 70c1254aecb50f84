"""Environments of one's own, for --env py:tests.support.own_environments:NAME."""

from prompt_r1.errors import FatalEnvError
from prompt_r1.types import Message


class BySession:
    """Replies that differ from game to game."""

    async def ask(self, messages: list[Message], session: str, sample: int, seed: int) -> str:
        return f"Anna, says {session} in game {sample} of run {seed} after {len(messages)} messages."


class Unauthorized:
    """Rejects every call."""

    async def ask(self, messages: list[Message]) -> str:
        raise FatalEnvError("invalid key")
