"""Settings of infer.py."""

from dataclasses import dataclass

from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.config.fields import NOT_NEGATIVE, parse_arguments, setting


@dataclass(frozen=True)
class InferConfig(EnvironmentConfig):
    """Settings of infer.py."""

    question: str = setting("", "question to ask; -: each line of standard input", everyday=True)
    questions: str = setting("", "file of questions: .txt, or .jsonl with a field question", everyday=True)
    agent: str = setting(
        "", "run folder, model folder, hub id, or mini (default: newest mini run)", everyday=True
    )
    env: str = setting("", "environment (default: that of the agent's training)", everyday=True)
    json: bool = setting(False, "print a JSON object for each question, not the dialogue", everyday=True)
    seed: int = setting(-1, "mini world and sampling (default: the run's)", everyday=True)
    temperature: float = setting(0.0, "of the agent; 0: greedy", range=NOT_NEGATIVE, everyday=True)
    max_turns: int = setting(0, "most turns; 0: the agent's", range=NOT_NEGATIVE, everyday=True)
    max_new: int = setting(0, "most new tokens of a turn; 0: the agent's", range=NOT_NEGATIVE, everyday=True)
    device: str = setting("auto", "auto, cpu or cuda")


def infer_config(arguments: list[str]) -> InferConfig:
    """Read the settings of infer.py."""
    about = "Ask a question: the agent questions the environment, and answers."
    return parse_arguments(InferConfig, "infer.py", about, arguments)
