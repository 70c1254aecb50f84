"""Deliberate mistakes of users: each ends with exit code 2 and one sentence that names what is wrong."""

import ast
import fcntl
import gc
import io
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.preflight import read_evaluation
from prompt_r1.pair.named_agent import SETTINGS_FILE
from prompt_r1.pair.settings import InferConfig, read_pair
from prompt_r1.programs.command_line import read_settings
from prompt_r1.programs.folders import write_manifest
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.preflight import read_training
from prompt_r1.training.run_folder import FORMAT, LOCK
from prompt_r1.training.settings import read_warm_start_config
from tests.support.paths import ROOT
from tests.support.settings import train_config

READERS = {
    "train.py": read_training,
    "infer.py": partial(read_pair, InferConfig),
    "evaluate.py": read_evaluation,
    "sft.py": read_warm_start_config,
}
SEEN_BEFORE_TORCH = [
    # flags
    ("train.py --lerning-rate 1", "there is no flag --lerning-rate; `train.py --help`"),
    ("train.py --step 9", "there is no flag --step; did you mean --steps?"),
    ("train.py --kl 0", "there is no flag --kl; did you mean --kl-coef?"),
    ("train.py --conifg=paper", "there is no flag --conifg; did you mean --config?"),
    ("infer.py --config paper", "there is no flag --config; `infer.py --help`"),
    ("infer.py Who is it?", "'Who' belongs to no flag: does a text with blanks need quotes?"),
    ("train.py --steps", "argument --steps: expected one argument"),
    # values
    ("train.py --steps many", "--steps takes a whole number, not 'many'"),
    ("train.py --steps 0", "--steps must be at least 1, not 0"),
    ("train.py --lr abc", "--lr takes a number, not 'abc'"),
    ("train.py --lr 0", "--lr must be at least 1e-12, not 0.0"),
    ("train.py --lr nan", "--lr must be at least 1e-12, not nan"),
    ("train.py --group-size 1", "--group-size must be at least 2, not 1"),
    ("evaluate.py --top-p 1.0000000005", "--top-p must be at most 1, not 1.0000000005"),
    ("train.py --temperature 1e-300", "--temperature must be at least 1e-06"),
    ("train.py --rule mine", "--rule must be one of paper, release, not 'mine'"),
    ("evaluate.py --limit -1", "--limit must be at least 0, not -1"),
    ("evaluate.py --method magic", "--method must be one of direct, cot"),
    # settings that contradict each other
    ("train.py --rule alone", "--rule must be one of paper, release, not 'alone'"),
    ("train.py --skip-no-spread", "would leave out games that the KL learns from: give --kl-coef 0"),
    ("train.py --adapter-rank 4 --parallel fsdp", "--adapter-rank needs whole weights on every GPU"),
    ("train.py --adapter-rank 4 --offload", "--offload is for sharded weights: give --parallel fsdp without"),
    ("train.py --config paper", "no training questions"),
    ("train.py --agent AGENT --data good.jsonl", "say how it learns and plays: --config paper"),
    # YAML files
    ("train.py --out ", "--out is empty: give a value, or leave the flag out"),
    ("train.py --reward=", "--reward is empty"),
    ("train.py --data good.jsonl ", "--data is empty"),
    ("train.py --steps ", "--steps is empty"),
    ("infer.py --agent ", "--agent is empty"),
    ("infer.py --question=\t", "--question is empty"),
    ("evaluate.py --env ", "--env is empty"),
    ("evaluate.py --out ", "--out is empty"),
    ("train.py --config ", "--config '': neither a preset (mini, small, paper) nor a YAML file"),
    ("train.py --config nowhere.yaml", "--config 'nowhere.yaml': neither a preset (mini, small, paper) nor"),
    ("train.py --config unknown.yaml", "unknown.yaml: unknown key 'lerning_rate'; `train.py --help-all`"),
    ("train.py --config typo.yaml", "typo.yaml: unknown key 'weight_dekay'; did you mean weight_decay?"),
    ("train.py --config folder", "--config 'folder': neither a preset (mini, small, paper) nor a YAML file"),
    ("train.py --config list.yaml", "list.yaml has no `key: value` lines"),
    ("train.py --config broken.yaml", "broken.yaml is not YAML"),
    # functions
    ("train.py --reward nothing", "--reward: give MODULE:NAME"),
    ("train.py --reward no_module:f", "--reward: cannot import 'no_module:f'"),
    ("train.py --reward json:decoder", "--reward json:decoder: it cannot be called as function(game, paper)"),
    ("train.py --loss-function nothing", "--loss-function: give MODULE:NAME"),
    (
        "train.py --advantage-function json:decoder",
        "--advantage-function json:decoder: it cannot be called as function(games)",
    ),
    # questions
    ("train.py --config mini --data none.jsonl", "none.jsonl: there is no such file"),
    ("train.py --config mini --data https://host/a.jsonl", "https://host/a.jsonl: there is no such file"),
    ("train.py --config mini --val-data none.jsonl", "none.jsonl: there is no such file"),
    ("train.py --config mini --test-data none.jsonl", "none.jsonl: there is no such file"),
    ("train.py --config mini --val-data none b.jsonl", "none: there is no such file"),
    ("train.py --config mini --val-data held-out b.jsonl", "held-out: there is no such file"),
    ("train.py --config mini --test-data none mini", "none: there is no such file"),
    ("train.py --config mini --data none", "none: there is no such file"),
    ("train.py --config mini --test-data held-out", "held-out: there is no such file"),
    ("train.py --data good.jsonl --val-data held-out other.jsonl", "held-out: there is no such file"),
    ("train.py --config mini --data /dev/null", "/dev/null: not a file of rows; give one"),
    ("train.py --config mini --data folder", "folder: not a file of rows; give one"),
    ("train.py --config mini --data empty.jsonl", "there are no questions in it"),
    ("train.py --config mini --data deep.jsonl", "deep.jsonl, row 1: not JSON"),
    ("evaluate.py --method direct --env mini --data notes.docx", "notes.docx"),
    ("evaluate.py --method direct --env mini --data mini:moon", "mini:moon: choose mini, or mini: and"),
    # agents and run folders
    ("infer.py --question Who?", "run `python train.py` first"),
    ("infer.py --question Who? --agent notes.docx", "notes.docx holds no model"),
    ("infer.py --question Who? --agent folder", "folder holds no model (config.json and *.safetensors)"),
    ("infer.py --question Who? --agent unweighted", "unweighted holds no model (config.json and"),
    ("infer.py --question Who? --agent pointer", "pointer holds weights that Git LFS has not fetched"),
    (
        "infer.py --question Who? --agent begun",
        "holds no model (config.json and *.safetensors), and no agent that",
    ),
    ("infer.py --question Who? --agent adapter", "adapter holds an adapter of peft"),
    *((f"train.py --agent {name}", "there is no such folder") for name in ("no/such/agent", "./no", "/no")),
    ("train.py --agent tiny@http://127.0.0.1:9/v1", "an agent plays in this process"),
    ("train.py --env tiny@http://localhost:9/v1", "tiny at http://localhost:9/v1: no server answers there"),
    ("evaluate.py --agent AGENT --env tiny@v2@http://127.0.0.1:9", "no server answers there: start it"),
    ("train.py --out notes.docx/run", "notes.docx/run: Not a directory; give --out a folder"),
    ("train.py --out folder", "there are files in it that are not of a run"),
    ("train.py --out used", "used is in use by process 7"),
    ("train.py --out trained --seed 1", "step-000001 was made with seed = 0, not 1: resume"),
    ("evaluate.py --method direct --env mini --out notes.docx", "File exists; give --out a folder"),
    ("evaluate.py --method direct --env mini --out folder", "files in it that are not of an evaluation"),
    ("evaluate.py --method direct --env mini --out answered", "made with top_p = 0.5, not 1.0"),
    ("evaluate.py", "run `python train.py` first"),
    (
        "evaluate.py --agent AGENT --env mini --data good.jsonl --method rft",
        "rft needs training questions: give --tr",
    ),
    (
        "evaluate.py --env py:json:loads --data good.jsonl --method gepa --train-data good.jsonl",
        "gepa needs validation questions: give --val-data",
    ),
    ("sft.py --agent AGENT", "give the games to learn from: --games FILE, or --games mini"),
    ("sft.py --agent folder --games mini", "folder holds no model"),
    ("sft.py --agent AGENT --games none.jsonl", "none.jsonl: there is no such file"),
    ("sft.py --agent AGENT --games empty.jsonl", "--games empty.jsonl: there are no games in it"),
    ("sft.py --agent AGENT --games mini:ood", "mini:ood: choose mini, or mini: and one of bridge"),
    # machine
    ("train.py --device gpu", "--device gpu: no such device; choose auto, cpu or cuda"),
    ("train.py --agent AGENT --offload", "give --parallel fsdp"),
    # environments
    ("evaluate.py --method direct", "no environment to ask: give --env SPEC"),
    ("train.py --agent AGENT --env what?@ever:80", "there is no environment 'what?@ever:80'"),
    ("train.py --agent AGENT --env m@localhost/v1", "a URL begins with http:// or https://"),
    ("train.py --agent AGENT --env m@http://localhost:65536/v1", "port at most 65535"),
    ("train.py --agent AGENT --env gpt-4o-mini", "needs a key: set OPENAI_API_KEY"),
    ("infer.py --question Who? --agent own", "'m' at https://api.openai.com/v1 needs a key"),
    ("evaluate.py --agent own --data good.jsonl", "'m' at https://api.openai.com/v1 needs a key"),
    ("evaluate.py --agent foreign --data good.jsonl", "'py:json:loads', which runs code: give it as --env"),
    ("infer.py --question Who? --agent foreign", "'py:json:loads', which runs code: give it as --env"),
    ("infer.py --question Who? --agent AGENT --env mini,mini-z", "'mini-z' at https://api.openai.com/v1"),
    ("train.py --agent AGENT --env hf:folder", "there is no Hugging Face model in 'folder'"),
    ("train.py --agent AGENT --env x@http://me:pw@host/v1", "without user, password or query"),
    ("train.py --agent AGENT --env mini,mini-b --route 1", "--route takes session, uniform or 2 weights"),
    ("train.py --agent AGENT --max-env-usd 5", "--max-env-usd needs --env-price"),
    ("train.py --agent AGENT --max-env-usd 5 --env-price 1,1", "--max-env-usd needs a limit of each reply"),
    ("train.py --agent AGENT --env-price cheap", "--env-price takes IN,OUT"),
    ("train.py --agent AGENT --env py:no_module:x", "cannot import 'no_module:x'"),
    ("train.py --agent AGENT --env-args {", "--env-args is not JSON"),
    ("train.py --agent AGENT --env-args t=0", """write '{"temperature": 0.7}', with both kinds of quotes"""),
]


@pytest.fixture
def folder(tmp_path, asking_agent, monkeypatch) -> Path:
    """A user's folder with wrong files, as the current one."""
    texts = {
        "unknown.yaml": "lerning_rate: 1\n",
        "typo.yaml": "weight_dekay: 1\n",
        "list.yaml": "- 1\n- 2\n",
        "broken.yaml": "a: [\n",
        "empty.jsonl": "\n",
        "good.jsonl": '{"question": "Who?", "answer": "Anna"}\n',
        "deep.jsonl": "[" * 100_000,
        "notes.docx": "notes",
        "unweighted/config.json": "{}",
        "unweighted/tokenizer.json": "{}",
        "pointer/config.json": "{}",
        "pointer/tokenizer.json": "{}",
        "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\n",
        "begun/metrics.jsonl": "",
        "adapter/adapter_config.json": "{}",
        "folder/notes.txt": "",
        "trained/checkpoints/step-000001/state.json": f'{{"format": {FORMAT}}}',
        "answered/config.yaml": "top_p: 0.5\ndepends_on: {}\n",
        "answered/predictions.jsonl": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    checkpoints = tmp_path / "trained/checkpoints"
    write_yaml(train_config([]), checkpoints / "step-000001/config.yaml")
    write_manifest(checkpoints / "step-000001")
    (tmp_path / "AGENT").symlink_to(asking_agent)
    for name, environment in (("own", "m"), ("foreign", "py:json:loads")):
        shutil.copytree(asking_agent, tmp_path / name)
        (tmp_path / name / SETTINGS_FILE).write_text(f"env: {environment}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def sentence_of(line: str, monkeypatch: pytest.MonkeyPatch, capfd) -> str:
    """What a program prints that ends with exit code 2."""
    program, *arguments = line.split(" ")
    if "deep" in line:
        gc.collect()  # a finalizer that runs at the recursion limit, in the middle of json, fails
    monkeypatch.setattr("sys.argv", [program, *arguments])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
    with pytest.raises(SystemExit) as left:
        read_settings(READERS[program])
    assert left.value.code == 2
    return capfd.readouterr().err


@pytest.mark.parametrize(("line", "words"), SEEN_BEFORE_TORCH, ids=lambda text: text[:60])
def test_a_mistake_is_one_sentence(folder, line, words, monkeypatch, capfd):
    (folder / "used").mkdir()
    with (folder / "used" / LOCK).open("w") as lock:
        lock.write("process 7")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_SH)
        shown = sentence_of(line, monkeypatch, capfd)
    assert words in shown and shown.count("\n") == 1 and "Traceback" not in shown
    assert len(shown) < 2200


def test_where_the_newest_checkpoint_is_damaged_the_one_before_is_checked_before_torch_is_imported(folder):
    """Its settings were compared after minutes, when the models had been loaded."""
    checkpoints = folder / "trained/checkpoints"
    (checkpoints / "step-000002").mkdir()
    (checkpoints / "step-000002/config.yaml").touch()
    write_manifest(checkpoints / "step-000002")
    (checkpoints / "step-000002/config.yaml").unlink()
    with pytest.raises(UsageError, match=r"step-000001 was made with seed = 0, not 1"):
        read_training(["--out", "trained", "--seed", "1"])
    (checkpoints / "step-000001/config.yaml").unlink()
    with pytest.raises(UsageError, match="none of the 2 checkpoints"):
        read_training(["--out", "trained"])


def test_what_needs_no_model_is_checked_before_torch_is_imported(tmp_path):
    """An unknown flag took seconds, and a missing file minutes."""
    code = f"""
import pickle, sys
readers = pickle.loads({pickle.dumps(READERS)!r})
for line in {[line for line, _ in SEEN_BEFORE_TORCH]!r}:
    program, *arguments = line.split(" ")
    try:
        readers[program](arguments)
    except Exception as error:
        assert type(error).__name__ in ("UsageError", "FatalEnvError"), error
    except SystemExit:
        pass
    slow = [module for module in ("torch", "transformers", "pyarrow", "numpy") if module in sys.modules]
    assert not slow, (line, slow)
"""
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        *("train.py", "infer.py", "evaluate.py", "-m prompt_r1.data", "-m prompt_r1.pair"),
        *("-m prompt_r1.training.report", "-m prompt_r1.training.warm_start"),
    ],
)
def test_a_python_without_the_packages_is_named_in_one_line(program):
    """A bug: without the virtual environment, the first command of a new user ended with a traceback."""
    line = [sys.executable, "-S", *program.split()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""
    assert "is not installed; activate the virtual environment" in done.stderr


@pytest.mark.parametrize("file", ["__init__.py", "errors.py", "programs/installation.py"])
def test_what_runs_before_the_version_is_checked_runs_in_an_old_python(file):
    """A bug: list[str] as an annotation was a traceback of Python 3.8."""
    tree = ast.parse((ROOT / "prompt_r1" / file).read_text("utf-8"), feature_version=(3, 8))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if isinstance(node.returns, ast.Subscript | ast.BinOp)]


def test_a_missing_package_of_wandb_is_named_before_the_imports(folder, monkeypatch):
    """It was named after eight seconds, when the run folder had been made."""
    monkeypatch.setattr("prompt_r1.training.preflight.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--wandb: `pip install wandb`"):
        read_training(["--wandb"])
    assert not (folder / "runs").exists()


def test_an_estimate_needs_no_key_and_makes_no_folder(folder):
    """A bug: the price in advance was refused to those who have no key yet."""
    before = {*folder.rglob("*")}
    read_training(["--config", "paper", "--data", "good.jsonl", "--env", "gpt-4o-mini", "--dry-run"])
    assert {*folder.rglob("*")} == before


def test_an_evaluation_that_has_begun_needs_no_key_to_write_its_tables_again(folder):
    """It did without --out, though the folder is the same."""
    line = ["--method", "direct", "--data", "good.jsonl", "--env", "gpt-4o-mini"]
    with pytest.raises(UsageError, match="needs a key"):
        read_evaluation(line)
    (folder / "runs/eval-environment").mkdir(parents=True)
    (folder / "runs/eval-environment/predictions.jsonl").touch()
    read_evaluation(line)


def test_an_agent_that_answers_alone_needs_no_key_of_its_training(folder):
    read_evaluation(["--agent", "own", "--data", "good.jsonl", "--method", "agent-only"])
