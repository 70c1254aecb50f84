"""The text of an agent's chat template, in a file.

A training keeps it in its run folder and in the folder of every exported agent, so that a run that resumes
tomorrow, and the trained agent, go on with the prompts of the training.
"""

import hashlib
import json
import re
from dataclasses import asdict, fields
from pathlib import Path

from prompt_r1.chat_template import Frame
from prompt_r1.errors import UsageError
from prompt_r1.foreign import json_object

FRAME_FILE = "chat_frame.json"
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
LARGEST_FRAME = 1_000_000  # bytes


def keep_frame(frame: Frame, folder: Path) -> None:
    """Write the frame into a folder."""
    content = asdict(frame) | {"checksum": checksum_of(frame)}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (folder / FRAME_FILE).write_text(text, "utf-8")


def checksum_of(frame: Frame) -> str:
    """What tells that no text of a frame has changed."""
    return hashlib.sha256(json.dumps(asdict(frame)).encode()).hexdigest()


def kept_frame(folder: Path | str) -> Frame | None:
    """The frame that a folder keeps; None if it keeps none, or if it is the name of a model on a hub."""
    file = Path(folder) / FRAME_FILE
    if not file.exists():
        return None
    with file.open("rb") as opened:
        texts = json_object(opened.read(LARGEST_FRAME))
    names = [f.name for f in fields(Frame)]
    found = [texts.get(name) for name in names]
    kept = [text for text in found if isinstance(text, str) and not HALF_A_CHARACTER.search(text)]
    # A run must not go on with other prompts. Files of older versions have no checksum.
    if len(kept) < len(names) or texts.get("checksum") not in (None, checksum_of(Frame(*kept))):
        raise UsageError(
            f"{file} does not hold the texts {', '.join(names)} as they were written: restore it, or delete "
            "it to render the chat template anew"
        )
    return Frame(*kept)
