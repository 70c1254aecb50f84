"""Prompt-R1: a small agent learns by reinforcement to question a large language model (arXiv 2511.01016).

    import prompt_r1

    with prompt_r1.load("runs/mini-seed0") as pair:
        print(pair.ask("Who is the mother of the director of Silent Valley?").answer)

The method, in reading order. Of the package, these ten files import only each other:

    types          question, turn, trajectory, reward
    protocol       what a turn may hold, and the codec between text and tokens
    rollout        play a game: the agent asks, the environment replies
    reward         score a game
    grpo           compare the games of a question, and the loss

    chat_template  the frame of roles that a model's own template puts around a turn (skip it at first)
    f1             compare an answer with the gold answers
    normalise      what of a text counts in this comparison (skip it at first)
    spending       what calls cost
    errors         what ends a call, a game or a run

The folders, called rooms, in reading order. The first two hold what the others share:

    programs       what the programs share: command line, safe output, files
    settings       the settings: dataclasses, presets, flags, YAML
    model          the weights: policy, attention, packing, adapters, distribution
    engine         sample turns: scheduler, KV cache, CUDA graphs
    environments   what the agent asks: endpoints, local models, budget, journal
    miniworld      the toy world and its agent
    data           questions: files, datasets, sampling
    pair           load an agent, and let it answer a question with its environment: API, server
    training       a run: batches, metrics, validation, checkpoints, report, warm start
    evaluation     compare methods: searches, imitation, scores, tables

The programs are train.py, infer.py and evaluate.py, and the modules prompt_r1.data, prompt_r1.pair,
prompt_r1.training.report and prompt_r1.training.warm_start.

The names in MODULES are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from prompt_r1.errors import EnvError, FatalEnvError, LimitReached, UsageError

if TYPE_CHECKING:  # Type checkers do not see what `__getattr__` imports.
    from prompt_r1.pair.api import Limits, Pair, load
    from prompt_r1.pair.dialogue import Piece
    from prompt_r1.types import Trajectory

__version__ = "0.3.0"
__all__ = [
    "EnvError",
    "FatalEnvError",
    "LimitReached",
    "Limits",
    "Pair",
    "Piece",
    "Trajectory",
    "UsageError",
    "__version__",
    "load",
]
# Imported on first use: `pair.api` imports torch, and `types` fails in old Pythons.
MODULES = {
    "Limits": "pair.api",
    "Pair": "pair.api",
    "Piece": "pair.dialogue",
    "Trajectory": "types",
    "load": "pair.api",
}


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> "list[str]":  # Quoted, because Python 3.8 would fail here, before `check_installation`.
    return sorted({*globals(), *__all__})
