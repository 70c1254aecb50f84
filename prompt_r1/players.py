"""Who plays and on what, from the names that a user writes: agents, question sets, the newest run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from prompt_r1.config import PRESETS, EvaluateConfig, TrainConfig, read_yaml
from prompt_r1.data import load_questions
from prompt_r1.distributed import Ranks
from prompt_r1.engine import Engine
from prompt_r1.environments import make_environment, parse_fields, parse_prices
from prompt_r1.environments.budget import Budget
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.pool import Pool
from prompt_r1.export import GAME_FILE
from prompt_r1.policy import Policy, load_policy, load_tokenizer
from prompt_r1.protocol import ACTION_ENDS, INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Environment, Question, Trajectory, UsageError

RUNS = Path("runs")
CACHE = RUNS / "cache"
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
    """An agent that is ready to play: weights, cache, tokens."""

    policy: Policy
    engine: Engine
    codec: Codec

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
        """One turn of a game; `watch` is called with each token as it is sampled."""
        stop = ACTION_ENDS if config.stop_tags else ()
        return await self.engine.generate(
            tokens, max_new=max_new, seed=seed, temperature=temperature, stop=stop, watch=watch
        )

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


def make_player(policy: Policy, codec: Codec, config: TrainConfig) -> Player:
    """Give a policy an engine for games of `config`."""
    engine = Engine(policy, stop_ids=codec.stop_ids, max_tokens=config.max_tokens,
                    kv_tokens=config.kv_tokens, decode=codec.decode)  # fmt: skip
    return Player(policy, engine, codec)


def load_player(
    path: str | Path, config: TrainConfig, device: torch.device, *, weights: torch.dtype | None = None
) -> Player:
    """An agent from its folder or hub id, to play the game of `config`, its weights in the compute dtype or
    in `weights`. Raises UsageError where it cannot.
    """
    codec = Codec(load_tokenizer(path), (INSTRUCTIONS | ALONE)[config.instruction])
    compute = compute_dtype(config, device)
    policy = load_policy(
        path, device=device, compute=compute, weights=weights or compute, temperature=config.temperature
    )
    return make_player(policy, codec, config)


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


def find_agent(name: str, seed: int) -> str | Path:
    """Where the model is that a user calls `name`: mini is built when it is not there yet."""
    if name == "mini":
        from prompt_r1.miniworld import mini_agent

        return mini_agent(seed, CACHE)
    folder = Path(name)
    return folder / "agent" if (folder / "agent" / "config.json").exists() else name


def trained_config(path: str | Path) -> TrainConfig | None:
    """How an exported agent was trained to play; None for a model that was not trained here."""
    file = Path(path) / GAME_FILE
    return TrainConfig(**read_yaml(file, TrainConfig)) if file.exists() else None


def newest_mini_run() -> Path:
    """The run folder under runs/ whose mini agent was saved last, of those that have learnt to ask."""

    def asks(game: TrainConfig) -> bool:
        return game.agent == "mini" and game.env != "none"

    found = [path for path in RUNS.glob(f"*/agent/{GAME_FILE}") if asks(trained_config(path.parent))]
    if not found:
        raise UsageError(
            f"no trained agent under {RUNS}/: run `python train.py` first, or give --agent and --env"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


def environment_opener(
    config: TrainConfig | EvaluateConfig, *, seed: int, folder: Path | None, ranks: Ranks
) -> Callable[..., Pool]:
    """Opens environments by SPEC, all with the run's one journal and budget: what the run spent before is in
    its journal. `fields` of each request and `prices`, if given, stand in place of the run's.
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
        )

    return open_environment


def open_environments(
    config: TrainConfig | EvaluateConfig,
    specs: Iterable[str],
    *,
    seed: int,
    folder: Path | None,
    ranks: Ranks,
) -> list[Pool]:
    """The environments of a run, with its one journal and budget."""
    open_environment = environment_opener(config, seed=seed, folder=folder, ranks=ranks)
    return [open_environment(spec) for spec in specs]


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


@dataclass(frozen=True)
class KnownAgent:
    """Where an agent lies, the game it plays, and the name of what it was before training, if it was."""

    path: str | Path
    game: TrainConfig
    start: str


def know_agent(name: str, *, kv_tokens: int) -> KnownAgent:
    """The agent that a user names for infer and evaluate; "" is the newest mini run.

    An agent that was not trained here plays the paper's game, the warm-started mini agent the mini world's.
    """
    path = find_agent(name or str(newest_mini_run()), seed=0)
    trained = trained_config(path)
    game = trained or TrainConfig(**PRESETS["mini" if name == "mini" else "paper"])
    return KnownAgent(path, replace(game, kv_tokens=kv_tokens), start=trained.agent if trained else name)


def check_fit(questions: Iterable[Question], codec: Codec, max_tokens: int) -> None:
    """Raise UsageError for a question that leaves the agent no room to write."""
    for question in questions:
        length = len(codec.opening(question.text))
        if length >= max_tokens:
            raise UsageError(f"question {question.id!r} takes {length} tokens of a game of {max_tokens}: "
                             "shorten it, or train with a larger --max-tokens")  # fmt: skip
