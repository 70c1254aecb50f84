"""Where the repository lies, and the published files beside it (absent on most machines)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
PUBLISHED = SHARED / "data" / "eval_data"
