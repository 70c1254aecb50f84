"""An agent behind a completions endpoint: `--agent MODEL@http://host:port/v1`.

It replaces the engine of an agent in this process: all tokens so far in, the tokens of the next turn out. The
prompt is sent as token ids, so that the server reads exactly the game's tokens and no text from outside can
become a control token. The completion is read from the token ids of the response where the server sends them
(vLLM does), else its text is encoded.
Log-probabilities of the sampled tokens are not requested: such an agent can play, but not be trained.
"""

import hashlib
import os
import re
from collections.abc import Callable

from prompt_r1.chat_template import special_ids, text_of
from prompt_r1.endpoint.client import EndpointClient, Transport
from prompt_r1.endpoint.request import ApiKey
from prompt_r1.errors import FatalEnvError, Resumable
from prompt_r1.protocol import Codec
from prompt_r1.types import Completion

KEY = "AGENT_API_KEY"  # not OPENAI_API_KEY: the environment's key must not be sent to another host
PATH = "/completions"


def parse_remote(name: str) -> tuple[str, str] | None:
    """The model and base URL of MODEL@URL; None for any other name of an agent."""
    match = re.fullmatch(r"([^\s@]+)@(https?://\S+)", name)
    return (match[1], match[2]) if match else None


class RemoteEngine:
    """Generates turns through POST /completions, with the retries of `EndpointClient`."""

    def __init__(
        self,
        model: str,
        base_url: str,
        codec: Codec,
        *,
        transport: Transport | None = None,
    ) -> None:
        self.name = f"{model}@{base_url}"
        self._codec = codec
        self._special_ids = special_ids(codec.tokenizer)
        self._turn_end = text_of(codec.tokenizer, [codec.turn_end])
        # Other servers than vLLM ignore these fields; if one rejects them, the client retries without.
        fields = {
            "return_token_ids": True,
            "stop_token_ids": sorted(codec.stop_ids),
            "skip_special_tokens": False,
            # A server may take other defaults from the model's generation_config.json. Games in this process,
            # as in training, sample from the whole distribution.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        key = ApiKey(os.environ.get(KEY, ""), variable=KEY)
        self._client = EndpointClient(model, base_url, key=key, fields=fields, transport=transport)

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        temperature: float = 1.0,
        top_p: float = 1.0,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """Generate the next turn. Its log-probabilities are unknown and set to 0. `watch` is not called.

        Raises Resumable for an endpoint that does not answer, FatalEnvError for one that never can.
        """
        content: dict[str, object] = {
            "prompt": tokens,
            "max_tokens": max_new,
            "temperature": temperature,
            "top_p": top_p,
            "seed": int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4]),
        }
        outcome = await self._client.send(PATH, content)
        if outcome.verdict == "fatal":
            raise FatalEnvError(f"the agent {self.name} cannot be used: {outcome.reason}")
        if outcome.verdict == "retry":
            raise Resumable(f"the agent {self.name} did not answer: {outcome.reason}; try again later")
        new = list(outcome.token_ids)
        new = new or self._codec.encode_trusted(outcome.text.partition(self._turn_end)[0])
        finished = outcome.finish == "stop"
        if finished and (not new or new[-1] not in self._codec.stop_ids):
            # The server stopped at this token but did not return it, or at another one of the model's.
            if new and new[-1] in self._special_ids:
                del new[-1]
            new.append(self._codec.turn_end)
        return Completion(new, [0.0] * len(new), finished)

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError for an endpoint that plainly cannot play."""
        await self._client.check(PATH, {"prompt": "Hi", "max_tokens": 1})
