"""The Hugging Face Hub: whether it answers."""

from functools import cache

from huggingface_hub import model_info
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

TIMEOUT = 10.0  # seconds


@cache
def hub_is_reachable(name: str) -> bool:
    """Ask the Hub once for a model. Any answer counts, also that there is none of this name.

    Its own client tries each file six times, with pauses, before it gives up.
    """
    try:
        model_info(name, timeout=TIMEOUT)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return True  # what asks next explains it better
    except Exception:  # no DNS, route or certificate: the exception depends on the Hub's HTTP client
        return False
    return True
