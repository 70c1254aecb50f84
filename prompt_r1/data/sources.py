"""Where the raw dumps of the paper's datasets are published: addresses, sizes, sums (SHA-256) and licences.

Sizes and sums of the dumps are those in the repository `huggingface/datasets` and in other public records;
the dumps were not downloaded to check them. An empty sum or a size of 0 is not known.
"""

from dataclasses import dataclass

HUB = "https://huggingface.co/datasets"
RELEASE = "https://github.com/QwenQKing/Prompt-R1"  # dataset/eval_data and dataset/train_data
# The published test files: name → SHA-256.
TEST_FILES = {
    "2WikiMultihopQA.parquet": "e2e5d9cc2c6a5fc78643bc2ac383ab2b5fe4ea0612cecec6614df796b3a3f85a",
    "BookSum.parquet": "f95d94296c385c5e0e73562aa42b33d4790ce5def66a7a0cc0be4bd2e334bf74",
    "DAPO-Math.parquet": "9723c9508414f628b1f36be1d3736f237bedcda2fb8c9e238bee9d7c9034afd2",
    "MathQA_ood.parquet": "703f1f7db70d9a1e60764187df538fe30bbb849bb7f90441bed466dab6a84871",
    "MusiQue.parquet": "53f6acdb53b609acd680bb3eccd7ac16ecf6a81c203c0814e01d52d5a4721dfb",
    "PopQA.parquet": "44955ca13d574cbe528d7becef53abf489acbc27d425430c0afa0856acc4d604",
    "WritingPrompts.parquet": "2633d25afe2c076b7684a45e774b138722b959a9d193cf1557973738c12b801d",
    "Xsum_ood.parquet": "bc147b5a71231ea217614a314b6486866086991271ab129398c9b7ddf76309b6",
    "gsm8k.parquet": "7fe0497ebf7fc8341c5554b2ae03c1292239d95f7292c4a42571a0079cf77b5e",
    "hotpot.parquet": "5432c889638283e813384a43100ff1a0275b5f9e79a6f1c90ffccab2ff8733a4",
    "squad_v2_ood.parquet": "0981aeffe6dbfae7f968ad90615df63fd27b4b2ed6b2f77db6011bc847d64339",
    "triviaqa_ood.parquet": "6518682d3efcc6056d3bbd02d37ca124dfb105addd0354405284f60c70680487",
}


@dataclass(frozen=True)
class Source:
    """The raw dump of a dataset. `files` are needed in the folder RAW/NAME; archives must be unpacked."""

    name: str  # of `convert --from`
    address: str
    files: tuple[str, ...]
    licence: str
    bytes: int = 0  # of the file at the address
    sha256: str = ""  # of the file at the address
    where: tuple[str, str] | None = None  # only rows with this value of a field


SOURCES = (
    Source(
        "2wiki",
        "https://www.dropbox.com/s/ms2m13252h6xubs/data_ids_april7.zip",
        ("train.json",),
        "Apache-2.0",
        258_968_175,
        "95df2bf56fdabe034e27aebc580e02264232203cf52552f9efe8a919e5529eef",
    ),
    Source(
        "hotpotqa",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_train_v1.1.json",
        ("hotpot_train_v1.1.json",),
        "CC BY-SA 4.0",
        566_426_227,
        "26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
    ),
    Source(
        "gsm8k",
        "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/train.jsonl",
        ("train.jsonl",),
        "MIT",
        4_166_206,
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
    Source(
        "dapo",
        f"{HUB}/BytedTsinghua-SIA/DAPO-Math-17k/resolve/main/data/dapo-math-17k.parquet",
        ("dapo-math-17k.parquet",),
        "Apache-2.0",
    ),
    Source(
        "musique",
        "https://drive.google.com/file/d/1tGdADlNjWFaHLeZZGShh2IRcpO6Lv24h (musique_v1.0.zip)",
        ("musique_ans_v1.0_train.jsonl",),
        "CC BY 4.0",
    ),
    Source("popqa", f"{HUB}/akariasai/PopQA/resolve/main/test.tsv", ("test.tsv",), "not stated"),
    Source("booksum", f"{HUB}/kmfoda/booksum/resolve/main/train.csv", ("train.csv",), "BSD-3-Clause (code)"),
    Source(
        "writingprompts",
        "https://dl.fbaipublicfiles.com/fairseq/data/writingPrompts.tar.gz",
        ("train.wp_source", "train.wp_target"),
        "MIT",
    ),
    Source(
        "mathqa",
        "https://math-qa.github.io/math-QA/data/MathQA.zip",
        ("test.json",),
        "Apache-2.0",
        7_302_821,
        "7344f30456a7aef3176d4866cc953b35b41bec44eda6b00cdbcfde2876b2f07a",
    ),
    Source(
        "squad",
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        ("dev-v2.0.json",),
        "CC BY-SA 4.0",
        4_370_528,
        "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    ),
    Source(
        "triviaqa",
        "http://nlp.cs.washington.edu/triviaqa/data/triviaqa-unfiltered.tar.gz",
        ("unfiltered-web-dev.json",),
        "not stated (code: Apache-2.0)",
        632_549_060,
        "7f0c94207fd0a1eb7bba3d52cdfe0735c98de850b9e5aa4e75f2776ef9a531d0",
    ),
    Source(
        "xsum",
        f"{HUB}/EdinburghNLP/xsum (the parquet file of the split test)",
        ("test.parquet",),
        "not stated (texts of the BBC)",
    ),
    Source(
        "narrativeqa",
        "https://raw.githubusercontent.com/google-deepmind/narrativeqa/master/qaps.csv",
        ("qaps.csv",),
        "Apache-2.0",
        where=("set", "test"),
    ),
)
