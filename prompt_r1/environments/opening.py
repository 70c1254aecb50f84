"""The environments: what can be questioned, by the name that a user writes."""

import json
import os
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.environments.budget import Budget, Price, parse_price
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import FreeSource, MeteredEnvironment, Source
from prompt_r1.environments.mini_optimizer import MiniOptimizer
from prompt_r1.environments.nobody import SPEC as NONE
from prompt_r1.environments.nobody import Nobody
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import UsageError

OPENAI_URL = "https://api.openai.com/v1"
MINI_SPECS = ("mini", "mini-b", "mini-mute")
OUR_FIELDS = ("model", "messages", "stream", "n")  # of a request: not the user's to set


def make_environment(
    spec: str,
    *,
    seed: int = 0,
    concurrency: int = 64,
    attempt_timeout: float = 120.0,
    call_deadline: float = 600.0,
    max_attempts: int = 6,
    requests_per_minute: float = 0.0,
    tokens_per_minute: float = 0.0,
    fields: Mapping[str, object] | None = None,
    route: str = "session",
    prices: tuple[Price, ...] = (Price(),),
    journal: Journal | None = None,
    budget: Budget | None = None,
    device: str = "auto",
    beside: Iterable[str] = (),
) -> Pool:
    """The environment called `spec`, or several of them, separated by commas, behind a routing rule.

    A name is mini, mini-b, mini-mute, mini-optimizer (a script that writes prompts, for the optimisers),
    none (for agents that ask nobody), MODEL@http://host:port/v1, MODEL, or hf:DIR. A MODEL without URL is at
    OPENAI_BASE_URL (default: OpenAI). The key is read from OPENAI_API_KEY; an endpoint that is given by its
    URL may do without, and beside a MODEL without URL, whose key it is, it does without (`beside`: what else
    the run questions). `seed` is that of the mini world, of a local model's sampling, and of the jitter of
    the waits between attempts. `fields` go into each request. Raises UsageError.
    """
    names = spec.split(",")
    if len(prices) not in (1, len(names)):
        raise UsageError(f"--env-price: give one price, or one for each of the {len(names)} environments")
    journal, budget = journal or Journal(None), budget or Budget()
    run = [*names, *(name for other in beside for name in other.split(","))]
    keyed = [name for name in run if _at_provider(name)] or names
    key = os.environ.get("OPENAI_API_KEY", "")
    members = []
    for name, price in zip(names, prices * len(names), strict=False):
        source = (
            _mini(name, seed)
            or _local(name, dict(fields or {}), seed=seed, concurrency=concurrency, device=device)
            or _chat(
                name, key=key if name in keyed else "", seed=seed, fields=fields,
                concurrency=concurrency, attempt_timeout=attempt_timeout, call_deadline=call_deadline,
                max_attempts=max_attempts, requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
            )
        )  # fmt: skip
        members.append(MeteredEnvironment(source, journal=journal, budget=budget, price=price))
    return Pool(members, budget=budget, route=route)


def parse_fields(text: str) -> dict[str, object]:
    """The extra fields of each request from the JSON object of --env-args. Raises UsageError."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--env-args is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError(f'--env-args takes a JSON object such as {{"temperature": 0.7}}, not {text!r}')
    taken = [name for name in OUR_FIELDS if name in fields]
    if taken:
        raise UsageError(f"--env-args may not set {taken[0]!r}")
    return fields


def parse_prices(texts: tuple[str, ...]) -> tuple[Price, ...]:
    """One price for all environments, or one for each."""
    return tuple(parse_price(text) for text in texts) or (Price(),)


def _at_provider(spec: str) -> bool:
    """Is it a MODEL without URL? The key is for its endpoint, and not for the hosts of others."""
    ours = (*MINI_SPECS, MiniOptimizer.name, NONE)
    return "@" not in spec and not spec.startswith("hf:") and spec not in ours


def _chat(spec: str, *, key: str, **settings: object) -> Source:
    match = re.fullmatch(r"(?!https?:)([^\s,@]+)(?:@(https?://[^\s,]+))?", spec)
    if match is None:
        raise UsageError(
            f"there is no environment {spec!r}: give mini, MODEL, MODEL@http://host:port/v1 or hf:DIR"
        )
    model, url = match.groups()

    from prompt_r1.endpoint.request import checked_base_url, is_loopback
    from prompt_r1.environments.chat import ChatEnvironment
    from prompt_r1.protocol import ENVIRONMENT_SYSTEM

    base_url = checked_base_url(url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    api_key = key.strip()
    if not api_key and not url and not is_loopback(base_url):
        raise UsageError(f"the environment {spec!r} at {base_url} needs a key: set OPENAI_API_KEY, "
                         "or give --env mini or MODEL@http://host:port/v1")  # fmt: skip
    rng = random.Random(settings.pop("seed"))  # type: ignore[arg-type]
    return ChatEnvironment(
        model=model, base_url=base_url, api_key=api_key, system=ENVIRONMENT_SYSTEM, rng=rng,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def _local(
    spec: str, fields: dict[str, object], *, seed: int, concurrency: int, device: str
) -> Source | None:
    if not spec.startswith("hf:"):
        return None
    folder = Path(spec.removeprefix("hf:"))
    if not (folder / "config.json").exists():
        raise UsageError(f"the environment {spec!r}: there is no Hugging Face model in {str(folder)!r}")

    from prompt_r1.environments.local import load_local

    return load_local(folder, fields=fields, seed=seed, slots=concurrency, device=device)


def _mini(spec: str, seed: int) -> Source | None:
    if spec == MiniOptimizer.name:
        return MiniOptimizer(seed=seed)
    if spec == NONE:
        return FreeSource(Nobody(), seed=seed)
    if spec not in MINI_SPECS:
        if spec.startswith("mini-") and "@" not in spec:
            raise UsageError(f"there is no environment {spec!r}: the mini world has {', '.join(MINI_SPECS)}")
        return None

    from prompt_r1.miniworld.beliefs import Style
    from prompt_r1.miniworld.environment import MiniEnvironment, MuteEnvironment
    from prompt_r1.miniworld.world import make_world

    if spec == "mini-mute":
        return FreeSource(MuteEnvironment(), seed=seed)
    style: Style = "B" if spec == "mini-b" else "A"
    return FreeSource(MiniEnvironment(make_world(seed), style=style, seed=seed), seed=seed)


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
