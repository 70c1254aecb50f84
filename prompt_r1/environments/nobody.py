"""`none`: no environment at all. What is asked is told to nobody."""

from prompt_r1.types import Message

SPEC = "none"


class Nobody:
    """Tells nothing, costs nothing."""

    name = "nobody"

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return "I have nothing to say about this."

    async def close(self) -> None:
        pass
