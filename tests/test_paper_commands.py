"""The way to the paper's tables, as its documents print it: every command of docs/data.md, docs/paper.md and
docs/evaluation.md, in order, in one folder, each on what the commands before it left there.
"""

import asyncio
import csv
import json
import re
from pathlib import Path

import pytest

from prompt_r1.data.files import load_questions
from prompt_r1.evaluation.predictions import FILE, read_predictions
from tests.support import tiny
from tests.support.encoder import save_encoder
from tests.support.mini_server import FaultyServer, with_server
from tests.support.paths import ROOT
from tests.support.published import parquet, published_row
from tests.support.shell import runner_in

PAGES = ("data.md", "paper.md", "evaluation.md")
SHORT = "--questions 2 --group-size 2 --mini-batch 4 --steps 1 --val-limit 2 --max-tokens 900 --device cpu"
TINY = f"{SHORT} --agent Qwen3-4B --instruction short --max-new 48 --dtype float32"
# What runs in place of what the documents print: tiny models, one step, an endpoint on this machine ({URL}),
# and no downloads.
REPLACED = {
    r"OPENAI_API_KEY=…": "OPENAI_API_KEY=k",
    r"^vllm serve .*": "true",
    r"^hf download .*": "true",
    r"hf:rajpurkar/squad_v2:train": "dumps/squad_train.json",
    r"http://127.0.0.1:8000/v1": "{URL}",
    r"--per-dataset 256": "--per-dataset 1",
    r"^python train.py --config paper": rf"\g<0> {TINY}",
    r"^python train.py(?! --config)": rf"\g<0> {SHORT} --test-data none",
    r"^python evaluate.py": r"\g<0> --limit 1 --device cpu",
    r"^python evaluate.py .*--tables": r"\g<0> --optimize-calls 9 --optimize-examples 1",
    r"^python evaluate.py .*hf:Qwen3-4B": r"\g<0> --optimize-calls 9 --optimize-examples 1",
    r"--agent runs/mini-seed0 runs/mini-b-seed0": r"\g<0> --train-data mini:validation",
    r"--limit 8": "",
    r"\"max_tokens\": (1024|64)": '"max_tokens": 16',
    r"--ssim-model auto": "--ssim-model encoder",
    r"--(agent|env) smollm2": r"--\1 hf:Qwen3-4B",
    r"--agent hf:Qwen3-4B --games mini:pop": "--agent Qwen3-4B --games mini:pop --epochs 1 --cutoff 450",
}
SOURCES = (
    "2WikiMultihopQA-256-test w-book-6600-256-test dapo-math-256-test MathQA-128-eval_ood MusiQue-256-test "
    "PopQA-256-test wp-6600-256-test xum-128-eval_ood gsm8k-256-test hotpot-256-test squad_v2-128-eval_ood "
    "triviaqa_train-128-eval_ood"
).split()


def printed_commands() -> list[str]:
    """The commands of the three pages, each on one line."""
    commands = []
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text("utf-8")
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            commands += [line for line in lines if line and not line.startswith("#")]
    return commands


def replaced(command: str, url: str) -> str:
    """The command as it runs here."""
    for pattern, replacement in REPLACED.items():
        command = re.sub(pattern, replacement, command)
    return command.replace("{URL}", url)


def write_dumps(folder: Path) -> None:
    """Three rows of each dataset, as its authors publish them, under the names that the commands read."""
    folder.mkdir()
    asked = {
        name: [f"Who is {name} {number}?" for number in range(3)] for name in ("2wiki", "hotpot", "gsm8k")
    }
    asked |= {
        name: [f"Who is {name} {number}?" for number in range(3)] for name in ("musique", "popqa", "squad")
    }

    def rows_of(name: str, **fields: object) -> list[dict[str, object]]:
        return [{"question": text, "answer": "Bob"} | fields for text in asked[name]]

    context = [["Bob", ["Bob is a film."]]]
    (folder / "2wiki_train.json").write_text(json.dumps(rows_of("2wiki", context=context)))
    (folder / "hotpot_train_v1.1.json").write_text(json.dumps(rows_of("hotpot", context=context)))
    solved = rows_of("gsm8k", answer="1 + 1 = 2\n#### 2")
    (folder / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solved))
    musique = rows_of("musique", answer_aliases=["Rob"], answerable=True)
    (folder / "musique_ans_v1.0_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in musique))
    answers = {"text": ["Bob"], "answer_start": [0]}
    (folder / "squad_train.json").write_text(json.dumps(rows_of("squad", answers=answers)))
    dapo = [
        {
            "prompt": [{"role": "user", "content": f"Find ${number}x$."}],
            "reward_model": {"ground_truth": "3", "style": "rule"},
        }
        for number in range(3)
    ]
    parquet(folder / "dapo-math-17k.parquet", *dapo)
    write_table(folder / "popqa_test.tsv", rows_of("popqa", possible_answers='["Bob"]'), delimiter="\t")
    books = [{"book_id": f"Emma {number}", "summary_text": "Emma is happy."} for number in range(3)]
    write_table(folder / "booksum_train.csv", books, delimiter=",")
    (folder / "train.wp_source").write_text("".join(f"[ WP ] A story of {number}\n" for number in range(3)))
    (folder / "train.wp_target").write_text("Once .\n" * 3)


def write_table(path: Path, rows: list[dict[str, object]], *, delimiter: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def prepare(folder: Path) -> None:
    """What a reader has before the first command: a checkout, the dumps, the test files, and models."""
    for name in ("train.py", "evaluate.py", "prompt_r1"):
        (folder / name).symlink_to(ROOT / name)
    write_dumps(folder / "dumps")
    (folder / "eval_data").mkdir()
    for source in SOURCES:
        parquet(folder / f"eval_data/{source}.parquet", published_row(f"What is {source}?", ["Bob"], source))
    (folder / "mine.csv").write_text("question,answer\n" + "".join(f"Why {n}?,Bob\n" for n in range(12)))
    tiny.save_asking_agent(folder / "Qwen3-4B")
    save_encoder(folder / "encoder")


@pytest.mark.slow
def test_every_command_on_the_way_to_the_papers_tables_runs(tmp_path):
    """Three of the ten columns were missing, the files had other names, and the runs other folders."""
    prepare(tmp_path)
    server = FaultyServer()
    server.models |= {"gpt-4o-mini": server.models["mini"], "gpt-oss-20b": server.models["mini"]}

    def run_all() -> None:
        run = runner_in(tmp_path, HF_HUB_OFFLINE="1", OPENAI_BASE_URL=server.base_url)
        script = [replaced(command, server.base_url) for command in printed_commands()]
        (tmp_path / "walk.sh").write_text("\n".join(script))
        done = run("set -x\n" + "\n".join(script))
        (tmp_path / "walk.log").write_text(done.stderr + done.stdout)

    with_server(asyncio.to_thread(run_all), server)
    assert len(load_questions(tmp_path / "train.jsonl")) == 16, "two of each dataset; the third validates"
    predictions = read_predictions(tmp_path / "runs/eval-paper" / FILE)
    answered = {(one.system.method, one.system.environment) for one in predictions}
    columns = "direct cot sft grpo-only opro textgrad gepa prompt-r1 agent-only untrained".split()
    assert {method for method, _ in answered} == set(columns)
    assert {("direct", "hf:Qwen3-4B"), ("cot", "hf:Qwen3-4B")} <= answered
    tables = (tmp_path / "runs/eval-paper/tables.md").read_text()
    assert tables.count("### Table 2") == 3 and "28.13" in tables, "the paper's number of Qwen3-4B alone"
    dollars = {one.system.environment: one.spent.usd for one in predictions if one.system.method == "direct"}
    assert dollars["gpt-4o-mini"] > 0 == dollars[f"gpt-oss-20b@{server.base_url}"]
