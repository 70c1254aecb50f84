"""The exceptions that end a call, a game or a run."""


class EnvError(Exception):
    """A call failed for good: its game ends and leaves its group; other games go on."""


class FatalEnvError(Exception):
    """No call can succeed (wrong key, no such model, ...): the run stops with this one sentence."""


class UsageError(Exception):
    """The user asked for the impossible: one sentence that says what, where and what to do (exit code 2)."""


class Resumable(Exception):
    """The run stopped before its end, with a checkpoint: one sentence that says why (exit code 75)."""
