"""Exceptions that end a call, a game or a run."""


class EnvError(Exception):
    """A call failed after all retries. Its game ends and leaves its group; other games go on."""


class UsageError(Exception):
    """Wrong usage: one sentence that says what is wrong, where, and how to fix it.

    Every function that reads what a user gave may raise it. A docstring mentions it only where the reader
    could not guess which input is refused.
    """

    exit_code = 2


class FatalEnvError(UsageError):
    """No call of the environment can succeed (wrong key, unknown model, …)."""


class QuestionTooLong(UsageError):
    """A question leaves the agent no room to write."""


class LimitReached(Exception):
    """A question was given up, because the next request might exceed its limit of dollars."""


class Resumable(Exception):
    """The run stopped early but can be resumed: one sentence that says why it stopped."""

    exit_code = 75


class AgentUnusable(Resumable):
    """The agent's logits are NaN or infinite, so it can write no token.

    If the logits overflow in 16 bits, the run can be resumed with --dtype float32. If the weights have
    diverged, only a new run with a smaller --lr helps.
    """


class SignalBeforeTraining(KeyboardInterrupt):
    """A signal came before training began (exit code 75; 130 for Ctrl-C).

    It is not an `Exception`. Some places catch `Exception` to explain why a model cannot be loaded, or why a
    user's function fails. They must not catch a signal.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(Resumable):
    """The user stopped the run by Ctrl-C."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message.

    A first line that ends with a colon says little ("Error(s) in loading state_dict for X:"), so the second
    line is added.
    """
    kind = type(error).__name__
    if isinstance(error, KeyError):  # Its message is only the key, such as 'model_type'.
        return f"{kind}: {error}"
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: in Python, in torch's allocators, in CUDA and NCCL, or in cuBLAS."""
    # Torch's error is recognised by its name, because this file must not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    texts = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
