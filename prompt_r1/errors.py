"""Exceptions that end a call, a game or a run."""

INTERRUPTED = "interrupted"  # the error of a game that Ctrl-C ended


class EnvError(Exception):
    """A call failed after all retries. Its game ends and leaves its group; other games go on."""


class FatalEnvError(Exception):
    """No call can succeed (wrong key, unknown model, …). The run stops with this message (exit code 2)."""


class UsageError(Exception):
    """Wrong usage: one sentence that says what is wrong, where, and how to fix it (exit code 2)."""


class QuestionTooLong(UsageError):
    """A question leaves the agent no room to write."""


class Resumable(Exception):
    """The run stopped early but can be resumed: one sentence that says why it stopped (exit code 75)."""


class Interrupted(Resumable):
    """The user stopped the run by Ctrl-C (exit code 130)."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next one if it only announces that; or its type."""
    text = type(error).__name__
    if isinstance(error, KeyError):  # its message is the bare key
        return f"{text}: {error}"
    first, *others = (str(error).strip() or text).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


# What torch's allocators, CUDA and NCCL, and cuBLAS say. Only the first has an error class of its own.
NO_CPU_MEMORY = "can't allocate memory"
OUT_OF_MEMORY = ("out of memory", NO_CPU_MEMORY, "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException) -> str:
    """The sentence of an error that says that memory ran out, whoever raised it; "" for other errors."""
    if isinstance(error, MemoryError):
        return f"{NO_CPU_MEMORY}: {error}" if str(error) else NO_CPU_MEMORY
    if not isinstance(error, RuntimeError):
        return ""
    sentences = [sentence.strip() for sentence in str(error).replace("\n", ". ").split(". ")]
    found = next((one for one in sentences if any(text in one for text in OUT_OF_MEMORY)), "")
    # By name: this file is read before torch is imported.
    return found or (sentences[0] if type(error).__name__ == "OutOfMemoryError" else "")
