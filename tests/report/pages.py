"""Read a page of the report as its script does."""

import json
import re
from pathlib import Path


def data_of(path: Path) -> list[dict]:
    """The data of a page: one or two runs."""
    html = path.read_text("utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])
