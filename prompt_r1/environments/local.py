"""A Hugging Face model as an environment: `--env hf:DIR`.

It generates with our own engine. The engines of agent and environment share an event loop: they take turns,
one forward pass at a time. The texts of the dialogue are encoded separately from the chat template, so that
no prompt of the agent can become a control token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from prompt_r1.chat_template import PieceEncoder, opened_think, parts_of, render
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.model_check import check_model
from prompt_r1.environments.reply_text import THINK_TAG, reply_of
from prompt_r1.environments.sources import Caller, Reply, Source, with_system
from prompt_r1.errors import UsageError
from prompt_r1.model.gguf import gguf_folder, is_gguf
from prompt_r1.model.loading import load_policy, load_tokenizer, longest_game, vocabulary_of
from prompt_r1.model.policy import Policy
from prompt_r1.settings.agent import HUGGING_FACE_PREFIX, SMOLLM2
from prompt_r1.types import Message

MAX_DIALOGUE_TOKENS = 8192  # tokens; less if the model supports less
MAX_SLOTS = 16
# The KV cache takes at most this share of the free memory. The rest is for an agent and its training, which
# are loaded later.
MEMORY_SHARE = 0.3


@dataclass(frozen=True)
class Template:
    """How a model's chat template treats messages."""

    accepts_system: bool  # False, as in Gemma's template: there is no system message.
    trims: bool  # True, as in Llama 3's template and Gemma's: white space around a message is left out.
    opened: str  # The template may open a block of thinking in front of the reply: its tag, or "".


def read_template(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Find out how a template treats messages. Raises UsageError if it cannot render a user message."""
    user: Message = {"role": "user", "content": "b\t"}  # The tab shows whether the template trims.
    rendered = render(tokenizer, [user])
    try:
        _, parts = parts_of(tokenizer, ["system", "user"])
        accepts_system = len(parts) == 2
    except UsageError:
        accepts_system = False
    return Template(accepts_system, trims=user["content"] not in rendered, opened=opened_think(rendered))


class LocalSource(Source):
    """A source that replies with text of the model, greedy or sampled, and counts tokens as an endpoint does.

    `fields` has the max_tokens of a reply, and the temperature. A dialogue with its reply has at most
    `capacity` tokens. Raises UsageError for a tokenizer without a chat template that works.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        fields: Mapping[str, float],
        folder: str,
        slots: int,
        seed: int,
        system: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.reply_limit: int = int(fields["max_tokens"])
        self.temperature = fields["temperature"]
        self.seed = seed
        self.system = system
        self.parameters = {"folder": folder, "seed": seed, "system": system, **fields}
        self.samples = self.temperature > 0
        config = policy.model.config.get_text_config()
        positions = longest_game(config) or getattr(config, "max_position_embeddings", None)
        self.capacity = min(positions or MAX_DIALOGUE_TOKENS, MAX_DIALOGUE_TOKENS)
        self._template = read_template(tokenizer)
        self._encoder = PieceEncoder(tokenizer)
        stop_ids = policy.end_ids
        if tokenizer.eos_token_id is not None:
            stop_ids |= {tokenizer.eos_token_id}
        # Special tokens are no part of a reply, but some models mark their thinking by special tokens.
        self._control_tokens = set(stop_ids)
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special and not THINK_TAG.fullmatch(token.content):
                self._control_tokens.add(number)
        self._engine = Engine(
            policy,
            stop_ids=stop_ids,
            max_tokens=self.capacity,
            max_sequences=min(slots, MAX_SLOTS),
            memory_share=MEMORY_SHARE,
        )

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        """Generate the reply. If a dialogue is too long for the model, its reply is a label without text."""
        tokens = self.encode(messages)
        room = self.capacity - len(tokens)
        if room < 1:
            reason = f"a dialogue of {len(tokens)} tokens"
            return Reply("", label="context_length", reason=reason, tokens_in=len(tokens))
        game = f"{caller.question}/{caller.sample}/{caller.epoch}"
        # Length and last message tell the calls of a game apart, so that each has a seed of its own. An equal
        # call has the same seed.
        completion = await self._engine.generate(
            tokens,
            max_new=min(room, self.reply_limit),
            seed=f"{self.seed}/{game}/{len(tokens)}/{messages[-1]['content']}",
            temperature=self.temperature,
        )
        sampled = [token for token in completion.tokens if token not in self._control_tokens]
        written = self.tokenizer.decode(sampled, skip_special_tokens=False)
        assert isinstance(written, str), "several texts from one row of tokens"
        finish = "stop" if completion.finished else "length"
        reply = reply_of(self._template.opened + written, finish=finish)
        return replace(
            reply, text=reply.text.strip(), tokens_in=len(tokens), tokens_out=len(completion.tokens)
        )

    def encode(self, messages: list[Message]) -> list[int]:
        """The tokens of the dialogue in the model's chat template, up to the start of its reply."""
        messages = with_system(messages, self.system)
        if messages[0]["role"] == "system" and not self._template.accepts_system:
            system, first, *others = messages
            messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]
        if self._template.trims:
            messages = [{**message, "content": message["content"].strip()} for message in messages]
        # Some templates write the system message before the last message, so the order is the template's.
        opening, parts = parts_of(self.tokenizer, [message["role"] for message in messages])
        tokens = self._encoder.trusted_start(opening)
        for number, frame in parts:
            tokens += self._encoder.untrusted(messages[number]["content"])
            tokens += self._encoder.trusted(frame)
        return tokens


def load_local(
    name: str, *, fields: Mapping[str, float], system: str, seed: int, slots: int, device: torch.device
) -> LocalSource:
    """Load the model of hf:DIR, hf:FILE.gguf or smollm2, with the arguments of LocalSource."""
    given = name.removeprefix(HUGGING_FACE_PREFIX)
    folder = gguf_folder(given) if is_gguf(given) else Path(given)
    compute = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokenizer = load_tokenizer(folder)
    policy = load_policy(
        folder,
        device=device,
        compute_dtype=compute,
        weights_dtype=compute,
        vocabulary=vocabulary_of(tokenizer),
    )
    check_model(policy)
    return LocalSource(
        policy,
        tokenizer,
        name=name if name == SMOLLM2 else HUGGING_FACE_PREFIX + folder.resolve().name,
        fields=fields,
        folder=str(folder.resolve()),
        slots=slots,
        seed=seed,
        system=system,
    )
