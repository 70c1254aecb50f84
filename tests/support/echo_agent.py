"""An agent without a model, for tests of what asks a pair: it passes the question on, and the reply back."""

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from prompt_r1.chat_template import decode
from prompt_r1.engine.kv_cache import TokenSequence
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.environment import Environment
from prompt_r1.protocol import Codec
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.types import Completion, GameSettings
from tests.support import tiny
from tests.support.methods import PricedSource
from tests.support.tiny import think


class EchoAgent:
    """Asks the environment the question itself, and answers with its last reply.

    A question "N: …" is asked N times before the answer. As with the engine, `watch` gets each token.
    """

    def __init__(self, *, seconds: float = 0.0, max_turns: int = 4) -> None:
        self.engine = self
        self.codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
        self.game = GameSettings(max_turns=max_turns, max_tokens=4000, max_new=2000, max_reply_tokens=0)
        self.seconds = seconds  # of a turn
        self.running = self.peak = 0
        self.sampled_with: list[tuple[str, float, float]] = []  # seed, temperature and top-p of each turn

    def new_sequence(self) -> AbstractContextManager[TokenSequence]:
        """A sequence, which this agent does not need."""
        return nullcontext(TokenSequence(0))

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        temperature: float,
        top_p: float = 1.0,
        sequence: TokenSequence | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        self.sampled_with.append((seed, temperature, top_p))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        text = decode(self.codec.tokenizer, tokens)
        replies = re.findall("<interaction_response>(.*?)</interaction_response>", text, re.DOTALL)
        question = re.search(f"Question: (.*?)\n{re.escape(INSTRUCTIONS['short'][:20])}", text, re.DOTALL)
        assert question
        number = re.match(r"(\d+):", question[1])
        if len(replies) < (int(number[1]) if number else 1):
            turn = think("I ask.", prompt=question[1])
        else:
            turn = think("Now I know.", answer=replies[-1])
        written = self.codec.tokenizer(turn, add_special_tokens=False)["input_ids"]
        written = [*written, self.codec.tokenizer.eos_token_id]
        for token in written:
            if watch is not None:
                watch(token)
                await asyncio.sleep(0)
        return Completion(written, [0.0] * len(written), True)


class Shouting:
    """A user's own environment."""

    name = "shouting"

    def ask(self, messages):
        return messages[-1]["content"].upper()


def paid_environment(*, max_usd: float = 0.0) -> Environment:
    """Replies of 10 tokens in and 10 out, at 1000 dollars per million tokens: 0.02 dollars each."""
    source = PricedSource(lambda messages: "Paid reply.", tokens_in=10, tokens_out=10)
    source.reply_limit = 10
    return Environment([source], budget=Budget(max_usd=max_usd), prices=[Price(1000, 1000)])
