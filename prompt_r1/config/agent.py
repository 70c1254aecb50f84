"""Settings of an agent and its game."""

from dataclasses import dataclass, fields, replace

from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, Range, setting
from prompt_r1.config.functions import import_reward
from prompt_r1.protocol import INSTRUCTIONS
from prompt_r1.reward import RULES, Rule
from prompt_r1.types import GameSettings


@dataclass(frozen=True)
class AgentConfig(EnvironmentConfig):
    """How an agent plays, and what it is trained and validated on; the defaults are the paper's."""

    dtype: str = setting(
        "bfloat16",
        "dtype of matrix products on GPUs; CPUs and the trained weights: float32",
        choices=("float32", "bfloat16"),
    )
    agent: str = setting(
        "Qwen/Qwen3-4B",
        "model folder, .gguf file, hub id, smollm2 or mini",
        everyday=True,
        identifies=True,
        group="agent, environment and data",
    )
    env: str = setting(
        "gpt-4o-mini",
        "mini, smollm2, MODEL, MODEL@URL, hf:DIR, several: A,B, or none",
        everyday=True,
        identifies=True,
    )
    data: tuple[str, ...] = setting(
        (), "mini, files, hf:ORG/NAME:SPLIT of the Hub, or py:MODULE:FUNCTION", everyday=True, identifies=True
    )
    val_data: tuple[str, ...] = setting(
        (), "validation questions; held-out: a tenth of --data; none: no validation", everyday=True
    )
    test_data: tuple[str, ...] = setting(
        (), "test questions, played at the end; none: no test", everyday=True
    )
    seed: int = setting(
        0, "seed of the mini world, question order and sampling", everyday=True, identifies=True
    )
    instruction: str = setting(
        "paper",
        "paper, paper-50 or short; alone or answer: without environment",
        choices=tuple(INSTRUCTIONS),
        identifies=True,
        group="the game",
    )
    max_turns: int = setting(5, "most turns of a game", range=POSITIVE, everyday=True, identifies=True)
    max_new: int = setting(1024, "most new tokens of a turn", range=POSITIVE, identifies=True)
    max_tokens: int = setting(8192, "most tokens of a game", range=POSITIVE, identifies=True)
    max_reply_tokens: int = setting(
        1024, "tokens of a reply that the agent reads; 0: all", range=NOT_NEGATIVE, identifies=True
    )
    rule: str = setting(
        "paper",
        "reward rule (eqs 12-15); alone: for --env none",
        choices=("paper", "release", "alone"),
        identifies=True,
    )
    reward: str = setting("", "MODULE:FUNCTION in place of the reward (eq. 15)", identifies=True)
    temperature: float = setting(
        1.0,
        "sampling temperature of training games; validation is greedy",
        range=Range(at_least=1e-6),
        identifies=True,
    )

    @property
    def game(self) -> GameSettings:
        """The rules of the game, without the rest of the training."""
        return GameSettings(**{f.name: getattr(self, f.name) for f in fields(GameSettings)})

    @property
    def reward_rule(self) -> Rule:
        """The rule of the reward, with the user's own reward if there is one."""
        rule = RULES[self.rule]
        return replace(rule, own=import_reward(self.reward)) if self.reward else rule
