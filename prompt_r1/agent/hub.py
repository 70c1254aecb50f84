"""Agents by their Hugging Face hub id: one attempt to reach the hub, instead of a minute of them."""

from functools import cache
from pathlib import Path

from huggingface_hub import model_info
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

SECONDS = 10.0  # that the hub may take to say that a model exists


def loading_options(path: str | Path) -> dict[str, bool]:
    """Options of `from_pretrained` for a folder or hub id: only cached files where the hub is out of reach.

    Left alone, huggingface_hub tries each file six times, with waits between, before it looks into its cache.
    """
    return {} if Path(path).is_dir() or _reachable(str(path)) else {"local_files_only": True}


@cache
def _reachable(name: str) -> bool:
    try:
        model_info(name, timeout=SECONDS)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return True  # the hub's word, or offline by choice: from_pretrained says it in its own sentence
    except Exception:  # no name service, no route, no certificate: the class differs between hub clients
        return False
    return True
