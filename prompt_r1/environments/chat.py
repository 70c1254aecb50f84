"""An environment behind an OpenAI-compatible chat-completions endpoint."""

import math
from collections.abc import Mapping
from dataclasses import replace

from prompt_r1.endpoint.client import EndpointClient
from prompt_r1.endpoint.request import USUAL_REPLY_TOKENS, Request
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import BILLED_CHARACTERS_PER_TOKEN
from prompt_r1.types import Message

PATH = "/chat/completions"
CHARACTERS_PER_TOKEN = 4  # of English text; only for the limit of tokens per minute


class ChatEnvironment:
    """Asks the model of a client. `system` opens every dialogue that has no system message."""

    def __init__(self, client: EndpointClient, *, system: str = "") -> None:
        self.name = client.model
        self.parameters: Mapping[str, object] = {"system": system, **client.fields}
        self._client = client
        self._system = system

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        """Return the outcome, after retries. `sample` is not sent: the provider draws its own samples."""
        if self._system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        characters = sum(len(message["content"]) for message in messages)
        tokens = characters // CHARACTERS_PER_TOKEN + USUAL_REPLY_TOKENS
        outcome = await self._client.send(Request(PATH, {"messages": messages}, tokens))
        return _with_estimated_usage(outcome, characters)

    async def check(self) -> None:
        hello = {"messages": [{"role": "user", "content": "Hi"}]}
        await self._client.check(Request(PATH, hello, USUAL_REPLY_TOKENS))

    async def close(self) -> None:
        await self._client.close()


def _with_estimated_usage(outcome: Outcome, characters: int) -> Outcome:
    """Estimate the tokens of a reply whose provider sent no usable counts: the budget counts them.

    `characters` is the length of the prompt. A request that was rejected (it has a reason) costs nothing.
    """
    if outcome.verdict in ("retry", "fatal") or outcome.reason:
        return outcome
    written = len(outcome.text) + len(outcome.reasoning)
    return replace(
        outcome,
        tokens_in=outcome.tokens_in or math.ceil(characters / BILLED_CHARACTERS_PER_TOKEN),
        tokens_out=outcome.tokens_out or math.ceil(written / BILLED_CHARACTERS_PER_TOKEN),
    )
