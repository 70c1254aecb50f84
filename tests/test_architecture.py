"""The rules of the layout that a machine can check: imports."""

import pytest

from tests.support.paths import ROOT
from tests.support.sizes import LIBRARY, files_imported_by, imported

# The method in one sitting, in this order; then train.py.
METHOD = ("types", "protocol", "rollout", "reward", "grpo")
# Training and asking work without these; the mini world they open by name, as they do a user's.
EXTRA = {"evaluation", "baselines", "api.py", "serving", "miniworld"}


def test_no_file_of_the_package_imports_a_script_a_study_or_a_test():
    outside = {"train", "infer", "evaluate", "tests", "benchmarks", "studies", "examples"}
    modules = [(path.name, module) for path in LIBRARY for module in imported(path)]
    assert not [(file, module) for file, module in modules if module.split(".")[0] in outside]


@pytest.mark.parametrize("program", ["train.py", "infer.py"])
def test_training_and_asking_import_no_extra(program):
    rooms = {path.relative_to(ROOT).parts[1] for path in files_imported_by(ROOT / program)}
    assert not rooms & EXTRA


@pytest.mark.parametrize("name", METHOD)
def test_a_file_of_the_method_imports_none_that_is_read_after_it(name):
    later = METHOD[METHOD.index(name) + 1 :]
    assert not {f"prompt_r1.{other}" for other in later} & set(imported(ROOT / f"prompt_r1/{name}.py"))
