"""Removed flags: the programs refuse them with one sentence.

An entry stays for one version. Agents that were trained with such a setting still play.
"""

FAULTS = "python -m tests.support.mini_server, in a checkout, serves the mini world with faults"
ROWS = "select or extend the rows of the file before `convert`"
AUTHORS = "it has the value of the method's authors"
AGENTS = "an agent plays in the process that asks it: give --agent the folder or hub id of its weights"
COST = "charge `game.spent.usd` in a --reward function, as docs/using.md shows"
# Flag → what to use instead.
REMOVED_FLAGS = {
    "--explain": "run python -m examples.minimal, which shows a game, its reward and its loss",
    "--cost-weight": COST,
    "--cost-of": COST,
    "--credit": "every token of a game has the advantage of the game",
    "--agent-prompts": AGENTS,
    "--agent-tokenizer": AGENTS,
    "--mini-batch-of": "--mini-batch counts games: for N questions give N times --group-size",
    "--adapter-alpha": "adapters change the weights by 32 / rank · B A: scale --lr instead",
    "--slow-attention": "a run whose attention is slow says so, and trains",
    "--fused-kernels": "the modules of transformers are used as they are",
    "--stop-tags": "a turn ends at an end token; what follows its first action is not read",
    "--ahead": "each step plays with the newest weights; --game-deadline ends games that wait too long",
    "--dry-run": "only train.py has it; --limit 20 measures a question, --max-env-usd is a hard limit",
    "--keep": "the two newest checkpoints are kept, and the best",
    "--env-tpm": "limit the requests with --env-rpm; a provider's Retry-After is obeyed",
    "--max-env-tokens": "give --max-env-usd with --env-price, or --max-env-calls",
    "--beta1": "it is 0.9, as in the paper's runs",
    "--live": "run the command again; training writes report.html with its checkpoints",
    "--where": ROWS,
    "--aliases": ROWS,
    "--with-context": ROWS,
    "--unanswerable": ROWS,
    "--opro-shown": AUTHORS,
    "--opro-threshold": AUTHORS,
    "--opro-exemplars": AUTHORS,
    "--textgrad-short-value": AUTHORS,
    "--search-per": "give all questions the same `dataset` for a single search",
    "--fail": FAULTS,
    "--faults": FAULTS,
    "--latency": FAULTS,
}


def removed_sentence(flag: str) -> str:
    """Why a flag is unknown, if an older version had it; else ""."""
    return f"{flag} was removed: {REMOVED_FLAGS[flag]}" if flag in REMOVED_FLAGS else ""
