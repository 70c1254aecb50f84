"""The pages name what exists: files, sections, functions, tests, modules, flags and their values."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.settings import InferConfig, ServeConfig
from prompt_r1.settings.fields import settings_of
from prompt_r1.settings.flags import given_values
from prompt_r1.settings.train import PRESETS, TrainConfig
from prompt_r1.training.settings import FineTuningConfig
from tests.support.paths import ROOT

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")})
CONFIGS = {
    "train.py": TrainConfig,
    "examples/train.slurm": TrainConfig,
    "evaluate.py": EvaluateConfig,
    "infer.py": InferConfig,
    "prompt_r1.pair": ServeConfig,
    "prompt_r1.training.warm_start": FineTuningConfig,
}
# Flags in the text that are no settings.
OTHER_FLAGS = {"--config", "--help-all"}
OTHER_FLAGS |= {"--exclude", "--per-dataset", "--share", "--test"}  # of prompt_r1.data
OTHER_FLAGS |= {"--kill-on-bad-exit", "--signal", "--signals-to-handle"}  # of Slurm and torchrun


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.replace(" ", "-") for text in words}


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command in the shell blocks of a page."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    commands = []
    for block in blocks:
        without_documents = re.sub(r"<<'END'\n.*?^END$", "", block, flags=re.DOTALL | re.MULTILINE)
        lines = without_documents.replace("\\\n", " ").splitlines()
        for line in lines:
            if "python " in line or "train." in line:
                for command in line.split("&&"):
                    commands.append(shlex.split(command.strip(" &$"), comments=True))
    return [words for words in commands if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_sections_that_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_programs_and_flags_that_exist(page):
    for words in commands_of(page):
        if "-m" in words:
            module = words[words.index("-m") + 1]
            assert find_spec(module), words
        names = [word for word in words if word in CONFIGS]
        if names:
            arguments = words[words.index(names[0]) + 1 :]
            presets = PRESETS if CONFIGS[names[0]] is TrainConfig else {}
            given_values(CONFIGS[names[0]], arguments, presets=presets)  # raises for an unknown flag


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_flags_in_the_text_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    settings = {setting.flag for config in CONFIGS.values() for setting in settings_of(config)}
    assert set(re.findall(r"`(--[a-z][a-z0-9-]*)", text)) <= settings | OTHER_FLAGS


def is_defined(name: str) -> bool:
    """Whether the file of a dotted name, such as `reward.score`, defines its classes and functions."""
    folder = ROOT if name.split(".")[0] in ("train", "examples", "studies") else ROOT / "prompt_r1"
    parts = name.split(".")
    while parts and not folder.with_suffix(".py").is_file():
        folder /= parts.pop(0)
    text = folder.with_suffix(".py").read_text("utf-8")
    return all(re.search(rf"^ *(async def|def|class) {part}\b", text, re.MULTILINE) for part in parts)


def test_each_equation_has_a_function_and_a_test_that_exist():
    page = (ROOT / "docs/paper.md").read_text("utf-8")
    table = page.split("| equation |")[1].split("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) >= 19
    for row in rows:
        _, _, _, functions, tests, _ = row.split("|")
        for name in re.findall(r"`([\w.]+)`", functions):
            assert is_defined(name), name
        named = re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+)\)", tests)
        assert named, row
        for test, file in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), test
