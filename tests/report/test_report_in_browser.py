"""The report in headless Chromium: content, filters, themes, phones, attacks and speed."""

import re
import unicodedata
from pathlib import Path

import pytest

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.report.page import write_report
from prompt_r1.terminal import printable
from prompt_r1.types import Question
from tests.support.browser import PROGRAM, Browser
from tests.support.played import HOSTILE, group_of, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")]


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps of four questions: two of maths, two of music."""
    questions = [
        Question(f"q{n}", "maths" if n % 2 else "music", f"Who is number {n}?", ("Anna",)) for n in range(12)
    ]
    steps = [[group_of(question) for question in questions[start : start + 4]] for start in (0, 4, 8)]
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps)


@pytest.fixture
def page(browser, run) -> Browser:
    browser.resize(1440, 1000)
    browser.open(write_report(run))
    browser.evaluate("localStorage.clear()")
    return browser


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent)")


def count(browser: Browser) -> str:
    """The numbers of questions and games that the filters leave."""
    return texts(browser, "#count")[0]


def wait(browser: Browser) -> None:
    """Wait for the browser's timers and redraws."""
    browser.evaluate("new Promise(done => setTimeout(done, 100))")


def set_filter(browser: Browser, name: str, value: str) -> None:
    """Set a filter like a user."""
    browser.evaluate(
        f"{{ const field = document.getElementById('{name}'); field.value = {value!r};"
        "field.dispatchEvent(new Event('input', { bubbles: true })); }"
    )


def clear_filters(browser: Browser) -> None:
    browser.evaluate("document.querySelector('button[type=reset]').click()")
    wait(browser)


def logged(browser: Browser) -> list[dict]:
    """Script errors, violations of the security policy, and console messages."""
    names = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    return [event for event in browser.events if event["method"] in names]


def requests(browser: Browser) -> list[str]:
    sent = [event for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


def test_the_page_shows_curves_and_games_and_requests_nothing_else(page):
    assert "Validation EM" in texts(page, ".chart .name") and "Reward" in texts(page, ".chart .name")
    assert count(page) == "12 questions, 48 games"
    assert len(texts(page, "#detail .game")) == 4
    assert not logged(page) and all(url.startswith("file:") for url in requests(page))
    assert len(requests(page)) == 1


def test_the_tables_of_the_test_open_below_the_totals(browser, tmp_path):
    run = write_run(tmp_path / "run", [[group_of(Question("q", "music", "Who?", ("Anna",)))]])
    (run / "test.md").write_text(markdown_table(["method", "EM"], [["trained <b>agent", "0.9"]]))
    browser.open(write_report(run))
    assert texts(browser, "#summary details :is(summary, th, td)") == [
        *("Test by dataset", "method", "EM", "trained <b>agent", "0.9")
    ]


def test_filters_select_games(page):
    set_filter(page, "dataset", "maths")
    assert count(page) == "6 questions, 24 games"
    clear_filters(page)
    set_filter(page, "right", "true")
    assert count(page) == "12 questions, 48 games"
    set_filter(page, "step", "2")
    assert count(page) == "4 questions, 16 games"
    set_filter(page, "search", "NUMBER 6")
    assert count(page) == "1 question, 4 games"
    assert texts(page, "#detail .question") == ["Who is number 6?"]
    set_filter(page, "search", "nothing like this")
    assert count(page) == "0 questions, 0 games" and "Clear the filters" in texts(page, "#detail")[0]


def test_a_game_shows_its_trained_tokens_its_replies_and_its_reward(page):
    right, wrong, bare, broken = texts(page, "#detail .game")
    assert "reward 1.00" in right and "gate open" in right and "= −1.00 + 1.00 + 1.00 = 1.00" in right
    assert "reward 0.00" in wrong and "gate open" in wrong and "nobody" in wrong
    assert "gate shut" in bare and "reward −0.10" in bare
    outcomes = texts(page, "#detail .outcome")
    assert outcomes == ["✓ right", "✗ wrong", "✓ right", "environment failed"]
    assert not re.search("[α-ω]", " ".join(texts(page, "#detail")))
    assert texts(page, "#detail .game:first-child .who span:first-child") == ["agent", "environment", "agent"]
    assert "no reward" in broken and "HTTP 500" in broken and "environment failed" in broken
    classes = page.evaluate(
        "[...document.querySelectorAll('#detail .game')].map(game =>"
        "[...game.querySelectorAll('.span')].map(span => span.className))"
    )
    assert classes == [*[["span wrote ", "span read", "span wrote "]] * 3, ["span wrote untrained"]]


TINTS = """[...document.querySelectorAll('#detail .game')].map(game => {
    const token = game.querySelector('.token');
    const [r, , b, alpha] = getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number);
    return alpha === 0 ? 'none' : r > b ? 'orange' : 'blue'; })"""


def test_each_token_is_tinted_by_its_advantage_its_log_probability_or_its_ratio(page):
    """Right, wrong, badly formed, and not trained on because the environment failed."""
    assert page.evaluate(TINTS) == ["blue", "orange", "orange", "none"]
    set_filter(page, "tint", "log-probability")
    assert page.evaluate(TINTS) == ["orange"] * 4, "sampled with 61 %"
    set_filter(page, "tint", "ratio")
    assert page.evaluate(TINTS) == ["blue"] * 3 + ["none"], "1.2 times as likely at the update"
    point = "document.querySelectorAll('#detail .token')[3].dispatchEvent(new PointerEvent('pointerenter'))"
    page.evaluate(point)
    [shown] = texts(page, "#token")
    assert shown.startswith("4. “") and "· log-probability −0.50 (61 %) · ratio 1.20 · advantage +" in shown
    select_last = "[...document.querySelectorAll('#detail .token')].at(-1)"
    page.evaluate(f"{select_last}.dispatchEvent(new PointerEvent('pointerenter'))")
    assert texts(page, "#token")[0].endswith("log-probability −0.50 (61 %) · not trained on")


def test_the_histogram_of_rewards_follows_the_filters(page):
    bars = """[...document.querySelectorAll('#rewards rect')].filter(bar => bar.getAttribute('height') > 0)
        .map(bar => bar.textContent)"""
    each = ["with −0.10 to −0.04", "with −0.04 to 0.01", "with 0.95 to 1.00"]  # one game of each per question
    assert page.evaluate(bars) == [f"12 games {place}" for place in each]
    assert texts(page, "#rewards .readout") == ["36 games, mean 0.30"]
    set_filter(page, "step", "2")
    assert page.evaluate(bars) == [f"4 games {place}" for place in each]
    set_filter(page, "search", "nothing like this")
    assert page.evaluate(bars) == [] and texts(page, "#rewards .readout") == ["0 games"]


def test_a_game_names_the_functions_of_the_user_that_scored_it(browser, tmp_path):
    run = write_run(tmp_path / "run", [[group_of(Question("q", "music", "Who?", ("Anna",)))]])
    write_yaml(
        TrainConfig(agent="mini", env="mini", answer_metric="mine:overlap", reward="mine:value"),
        run / "config.yaml",
    )
    browser.open(write_report(run))
    right = texts(browser, "#detail .game")[0]
    assert "mine:overlap 1.00" in right and "F1" not in right and "reward = mine:value = 1.00" in right


def test_the_arrow_keys_move_between_the_questions_of_the_list(page):
    selected = "document.querySelector('[aria-selected=true] .ask').textContent"
    page.evaluate("document.getElementById('list').focus()")
    for key, number in (("ArrowDown", 1), ("ArrowDown", 2), ("ArrowUp", 1), ("End", 11), ("Home", 0)):
        page.key(key)
        assert page.evaluate(selected) == f"Who is number {number}?"


def test_pointing_at_a_curve_shows_the_values_of_all_curves_at_the_step(page):
    page.evaluate("moveCursor(1)")
    shown = dict(zip(texts(page, ".chart .name"), texts(page, ".chart .readout"), strict=True))
    assert shown["Turns"] == "step 1: 2" and shown["Validation EM"].startswith("step 0: 0.100 [0.02, 0.40]")
    assert shown["Answered games"] == "step 1: 0.750"
    page.evaluate("showStep(3)")
    assert count(page) == "4 questions, 16 games"


TEXTS = ("h1", ".about", ".row .facts", ".read .who", ".gold", ".shut", ".open", "button", "#count")
CONTRAST = """(selector => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => linear(Number(c) / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const style = (node) => getComputedStyle(node);
    const node = document.querySelector(selector);
    let ground = node;
    while (style(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
    const [a, b] = [light(style(node).color), light(style(ground).backgroundColor)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })"""


def test_dark_and_light_themes_have_enough_contrast(page):
    """WCAG 2 asks for 4.5 to 1."""
    grounds = []
    for dark in (False, True):
        page.resize(1440, 1000, dark=dark)
        wait(page)
        grounds.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        for selector in TEXTS:
            assert page.evaluate(f"{CONTRAST}({selector!r})") >= 4.5, (selector, dark)
    assert grounds[0] != grounds[1]


def test_a_phone_needs_no_horizontal_scrolling(page):
    page.resize(360, 780, phone=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.evaluate("""[...document.querySelectorAll('main *')]
        .filter(node => !node.closest('svg') && node.getBoundingClientRect().right > 361)
        .map(node => node.className)""")
    assert wide == []
    assert page.evaluate("document.querySelector('.game').getBoundingClientRect().width") > 250


def test_two_runs_are_compared_question_by_question(browser, run, tmp_path):
    questions = [Question(f"q{n}", "music", f"Who is number {n}?", ("Anna",)) for n in range(4)]
    other = write_run(tmp_path / "other", [[group_of(question, reply="Ask Bob.") for question in questions]])
    browser.resize(1440, 1000)
    browser.open(write_report(run, other))
    assert texts(browser, "#run-legend .key") == ["A  run", "B  other"]
    assert len(texts(browser, "#detail .players")) == 2 and len(texts(browser, "#detail .game")) == 8
    assert count(browser) == "12 questions, 64 games"
    reward = "[...document.querySelectorAll('.chart')].find(chart => chart.textContent.startsWith('Reward'))"
    assert browser.evaluate(f"{reward}.querySelectorAll('.curve').length") == 2
    for width, phone in ((1440, False), (390, True)):
        browser.resize(width, 900, phone=phone)
        assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert len(texts(browser, ".verdict")) == len(texts(browser, "#summary p")) == 2
    assert not logged(browser)


def test_hostile_texts_are_shown_and_run_nothing(browser, tmp_path):
    groups = []
    for n, text in enumerate([*HOSTILE, "long " * 10_000]):
        groups.append(group_of(Question(f"q{n}", text[:60], text, ("Anna", text)), reply=text))
    browser.open(write_report(write_run(tmp_path / "<img src=x onerror=alert(1)>", [groups])))
    assert not logged(browser) and len(requests(browser)) == 1
    for number, text in enumerate(HOSTILE):
        browser.evaluate(f"select({number})")
        shown = texts(browser, "#detail .question")[0]
        words = texts(browser, "#detail .game .read .words")[0]
        reply = words.partition("<interaction_response>")[2].rpartition("</interaction_response>")[0]
        visible = re.sub(r"U\+[0-9A-F]{4,6}", "", reply)
        spoken = text.replace("</interaction_response", "&lt;/interaction_response")
        letters = "".join(c for c in spoken if c.isprintable() or c == "\n")
        assert visible == letters and (shown == text) == text.replace("\n", "").isprintable()
    browser.evaluate(f"select({len(HOSTILE)})")
    assert len(texts(browser, "#detail .game .read .words")[0]) > 50_000
    shown = "document.querySelector('#detail .read .words').getBoundingClientRect().height"
    assert browser.evaluate(shown) <= 640, "a long text scrolls in its box"
    assert browser.evaluate("document.title").startswith("Prompt-R1 · <img")
    assert browser.evaluate("document.querySelectorAll('img, iframe, object, main script').length") == 0
    browser.evaluate("select(3)")
    assert texts(browser, "#detail .question .control") == ["U+202E", "U+202C", "U+2066"]


def test_the_page_shows_the_same_characters_as_the_terminal_as_code_points(page):
    """A bug: the page had a list of its own, without U+00AD, the tags from U+E0020 on, and others.

    A character that Python's Unicode does not know yet may be known to the browser.
    """
    shown = page.evaluate("""Array.from({ length: 0x110000 }, (_, number) => number).filter((number) =>
        plain(String.fromCodePoint(number)) ===
            `[U+${number.toString(16).toUpperCase().padStart(4, "0")}]`)""")
    escaped = {number for number in range(0x110000) if printable(chr(number)) != chr(number)}
    differing = escaped.symmetric_difference(shown)
    assert all(unicodedata.category(chr(number)) == "Cn" for number in differing)
    assert {0x1B, 0xAD, 0x61C, 0x200B, 0x202E, 0xD800, 0xE000, 0xFEFF, 0xE0041} <= set(shown)


def test_the_security_policy_blocks_injected_markup(browser, run, tmp_path):
    """A second line of defence: even markup that got into the page does nothing."""
    html = write_report(run).read_text("utf-8")
    attack = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    attack += '<style>h1 { display: none }</style><p style="display: none" onclick="1">x</p>'
    (tmp_path / "attacked.html").write_text(html.replace("<main>", "<main>" + attack), "utf-8")
    browser.open(tmp_path / "attacked.html")
    assert browser.evaluate("document.title") == "Prompt-R1 · run"
    assert browser.evaluate("getComputedStyle(document.querySelector('h1')).display") == "block"
    assert len(logged(browser)) >= 4


def test_five_thousand_games_are_ready_in_two_seconds(browser, tmp_path):
    """From the start of the navigation until the page responds; games of about 1,100 tokens."""
    words = "The composer of Silver River is Greta Rossi, as far as I know. "
    questions = [
        Question(f"q{n}", f"set {n % 8}", f"Who is number {n}? {words}", ("Anna",)) for n in range(25)
    ]
    groups = [group_of(question, reply=words * 12) for question in questions]
    run = write_run(tmp_path / "large", [groups] * 50)
    path = write_report(run)
    times = []
    for _ in range(3):
        browser.open(path)
        times.append(int(browser.evaluate("document.documentElement.dataset.ready")))
    assert count(browser) == "1,250 questions, 5,000 games"
    assert min(times) < 2000, times
    searched = browser.evaluate("""(() => { const begin = performance.now();
        document.getElementById('search').value = 'number 17'; applyFilters();
        return performance.now() - begin; })()""")
    assert count(browser) == "50 questions, 200 games"
    assert searched < 1000, searched
    print(f"ready after {times} ms; {path.stat().st_size / 1e6:.1f} MB; first search {searched:.0f} ms")


def test_every_word_with_a_dotted_line_is_explained(page):
    titles = page.evaluate("[...document.querySelectorAll('abbr')].map(node => node.title)")
    assert len(titles) > 20 and all(len(title) > 20 for title in titles)
