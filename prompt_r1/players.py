"""Who plays, where and on what: agents, environments and question sets, by the names that a user writes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prompt_r1.agents import KnownAgent
from prompt_r1.config import EvaluateConfig, TrainConfig
from prompt_r1.data import load_questions
from prompt_r1.distributed import Ranks
from prompt_r1.engine import Engine
from prompt_r1.environments import make_environment, parse_fields, parse_prices
from prompt_r1.environments.budget import Budget
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.pool import Pool
from prompt_r1.policy import Policy, load_policy, load_tokenizer
from prompt_r1.protocol import ACTION_ENDS, INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.served import ServedAgent, served_parts
from prompt_r1.types import Completion, Environment, Question, Trajectory, UsageError

ANSWER_IN_TAGS = "Write the final answer, and nothing but the final answer, between <answer> and </answer>."
# For an agent without environment: the form of the paper's last step, and that of supervised fine-tuning.
ALONE = {
    "alone": """\
Think about the question, then answer it. Write:
   <think>(your reasoning)</think>
   <answer>(final answer for the question)</answer>""",
    "answer": ANSWER_IN_TAGS,  # what environments that are asked once are told, too
}


@dataclass(frozen=True)
class Player:
    """An agent that is ready to play: its engine, in this process or behind an endpoint, and its codec."""

    engine: Engine | ServedAgent
    codec: Codec

    @property
    def policy(self) -> Policy:
        """The weights that play, of an agent in this process."""
        assert isinstance(self.engine, Engine)
        return self.engine.policy

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        config: TrainConfig,
        temperature: float,
        watch: Callable[[int], None] | None = None,
    ) -> Completion:
        """One turn of a game; `watch` is called with each token as it is sampled in this process."""
        stop = ACTION_ENDS if config.stop_tags else ()
        generate = self.engine.generate
        if isinstance(self.engine, Engine):
            generate = partial(self.engine.generate, watch=watch)
        return await generate(tokens, max_new=max_new, seed=seed, temperature=temperature, stop=stop)

    async def play(
        self,
        question: Question,
        seed: str,
        sample: int = 0,
        *,
        environment: Environment,
        config: TrainConfig,
        temperature: float,
    ) -> Trajectory:
        """One game with the settings it was trained with; `sample` is its number in its group."""
        generate = partial(self.generate, config=config, temperature=temperature)
        ask = partial(environment.ask, sample=sample, session=question.id)
        return await play(question, generate, ask, self.codec, max_turns=config.max_turns,
                          max_tokens=config.max_tokens, max_new=config.max_new, seed=seed,
                          max_reply=config.max_reply_tokens, force_answer=config.force_answer)  # fmt: skip

    def forget(self) -> None:
        """Drop what was computed with weights that are others now."""
        if isinstance(self.engine, Engine):
            self.engine.forget()

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if isinstance(self.engine, ServedAgent):
            await self.engine.close()


def make_player(policy: Policy, codec: Codec, config: TrainConfig) -> Player:
    """Give a policy an engine for games of `config`."""
    engine = Engine(policy, stop_ids=codec.stop_ids, max_tokens=config.max_tokens,
                    kv_tokens=config.kv_tokens, decode=codec.decode)  # fmt: skip
    return Player(engine, codec)


def load_player(
    path: str | Path, config: TrainConfig, device: torch.device, *, weights: torch.dtype | None = None
) -> Player:
    """An agent from its folder or hub id, to play the game of `config`, its weights in the compute dtype or
    in `weights`. Raises UsageError where it cannot."""
    codec = Codec(load_tokenizer(path), (INSTRUCTIONS | ALONE)[config.instruction])
    compute = compute_dtype(config, device)
    policy = load_policy(
        path, device=device, compute=compute, weights=weights or compute, temperature=config.temperature
    )
    return make_player(policy, codec, config)


def codec_of(known: KnownAgent) -> Codec:
    """The codec of an agent's tokenizer and game."""
    instruction = (INSTRUCTIONS | ALONE)[known.game.instruction]
    return Codec(load_tokenizer(known.tokenizer or known.path), instruction)


def load_known(known: KnownAgent, device: torch.device) -> Player:
    """The agent that a user named, ready to play its game."""
    served = served_parts(str(known.path))
    if served is None:
        return load_player(known.path, known.game, device)
    codec = codec_of(known)
    return Player(ServedAgent(*served, codec, prompts=known.prompts), codec)


async def check_served(known: KnownAgent) -> None:
    """Raise UsageError or FatalEnvError for a served agent that plainly cannot play."""
    served = served_parts(str(known.path))
    if served is None:
        return
    agent = ServedAgent(*served, codec_of(known), prompts=known.prompts)
    try:
        await agent.check()
    finally:
        await agent.close()


def load_learner(start: Path | str, config: TrainConfig, player: Player, ranks: Ranks) -> Policy:
    """The float32 weights that are trained: the player's own where those are float32 and nothing is sharded,
    else others, which the player follows. Raises UsageError for an `--offload` of what is not sharded.
    """
    if ranks.mesh is None and config.offload != "none":
        raise UsageError(f"--offload {config.offload} is for sharded weights: give --parallel fsdp or hsdp")
    if ranks.mesh is None and player.policy.compute == torch.float32:
        return player.policy
    return _load_share(start, player, ranks, weights=torch.float32, offload=config.offload == "all")


def load_reference(start: Path | str, config: TrainConfig, player: Player, ranks: Ranks) -> Policy:
    """The frozen start model of the KL, at the temperature of sampling."""
    # Sharded weights are gathered in the compute dtype: the learner's before its first step are these.
    weights = torch.float32 if ranks.mesh is None else player.policy.compute
    return _load_share(
        start, player, ranks, weights=weights, offload=config.offload != "none"
    ).requires_grad_(False)


def _load_share(
    start: Path | str, player: Player, ranks: Ranks, *, weights: torch.dtype, offload: bool
) -> Policy:
    """A model whole on this rank's device, or this rank's share of it: then a GPU never holds the whole."""
    device = ranks.device if ranks.mesh is None else torch.device("cpu")
    like = player.policy
    policy = load_policy(
        start, device=device, compute=like.compute, weights=weights, temperature=like.temperature
    )
    if ranks.mesh is not None:
        policy.shard(ranks.mesh, ranks.device, offload=offload)
    return policy


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: what the config says; float32 on a CPU, where bfloat16 is slow."""
    return torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)


def environment_opener(
    config: TrainConfig | EvaluateConfig,
    *,
    seed: int,
    folder: Path | None,
    ranks: Ranks,
    beside: Collection[str] = (),
) -> Callable[..., Pool]:
    """Opens environments by SPEC, all with the run's one journal and budget: what the run spent before is in
    its journal. `fields` of each request and `prices`, if given, stand in place of the run's. `beside`: the
    SPECs that the run may open, if more than one (make_environment).
    """
    if config.max_env_usd and not config.env_price:
        raise UsageError("--max-env-usd needs --env-price IN,OUT: without a price no dollar is ever counted")
    journal = Journal(
        folder / "journal" if folder else None,
        mode=config.journal,
        rank=ranks.rank,
        others=[Path(name) for name in config.journal_from],
    )
    budget = Budget(
        max_calls=config.max_env_calls,
        max_tokens=config.max_env_tokens,
        max_usd=config.max_env_usd,
        spent=journal.spent,
        ranks=ranks.count,
    )

    def open_environment(
        spec: str, *, fields: Mapping[str, object] | None = None, prices: tuple[str, ...] = ()
    ) -> Pool:
        return make_environment(
            spec,
            seed=seed,
            concurrency=config.env_concurrency,
            attempt_timeout=config.env_timeout,
            requests_per_minute=config.env_rpm,
            tokens_per_minute=config.env_tpm,
            fields=parse_fields(config.env_args) if fields is None else fields,
            route=config.route,
            prices=parse_prices(prices or config.env_price),
            journal=journal,
            budget=budget,
            device=config.device,
            beside=beside,
        )

    return open_environment


def find_questions(names: Iterable[str], split: str, seed: int) -> list[Question]:
    """The questions of `mini` (its `split`, or mini:SPLIT) and of files, one after the other."""
    questions: list[Question] = []
    for name in names:
        world, _, part = name.partition(":")
        questions += _mini_questions(part or split, seed) if world == "mini" else load_questions(Path(name))
    return questions


def _mini_questions(split: str, seed: int) -> list[Question]:
    from prompt_r1.miniworld import mini_world

    splits = ("train", "validation", "test", "ood")
    if split not in splits:
        raise UsageError(f"the mini world has no split {split!r}: choose one of {', '.join(splits)}")
    return getattr(mini_world(seed), split)


def check_fit(questions: Iterable[Question], codec: Codec, max_tokens: int) -> None:
    """Raise UsageError for a question that leaves the agent no room to write."""
    for question in questions:
        length = len(codec.opening(question.text))
        if length >= max_tokens:
            raise UsageError(f"question {question.id!r} takes {length} tokens of a game of {max_tokens}: "
                             "shorten it, or train with a larger --max-tokens")  # fmt: skip
