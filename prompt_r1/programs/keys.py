"""Keep keys out of what is printed or written."""

import os
import re

# A key of fewer characters ("EMPTY", "ollama") is a placeholder, which replies may contain.
MIN_SECRET_LENGTH = 12
# Names of environment variables that hold a secret, such as OPENAI_API_KEY, HF_TOKEN and WANDB_API_KEY.
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def scrub(text: str, key: str) -> str:
    """Replace the key in a text, in upper or lower case, by "[key]"."""
    # In a long text, this test is much faster than the search below.
    if not key or key.lower() not in text.lower():
        return text
    return re.sub(re.escape(key), "[key]", text, flags=re.IGNORECASE)


def without_keys(text: str) -> str:
    """The text without the values of environment variables that hold a secret."""
    for name, value in os.environ.items():
        secret = value.strip()
        if SECRET_NAME.search(name) and len(secret) >= MIN_SECRET_LENGTH:
            text = scrub(text, secret)
    return text
