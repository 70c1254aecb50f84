"""The exceptions that end a call, a game or a run."""


class EnvError(Exception):
    """A call failed after all retries. Its game ends and leaves its group; other games go on."""


class FatalEnvError(Exception):
    """No call can succeed (wrong key, unknown model, …). The run stops with this message (exit code 2)."""


class UsageError(Exception):
    """Wrong usage: one sentence that says what is wrong, where, and how to fix it (exit code 2)."""


class QuestionTooLong(UsageError):
    """A question leaves the agent no room to write."""


class InternalError(Exception):
    """A bug of ours ended the program: one sentence that says what to report (exit code 1)."""


class Resumable(Exception):
    """The run stopped early but can be resumed: one sentence that says why it stopped (exit code 75)."""
