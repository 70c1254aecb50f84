// The filters, the list of questions (which holds only the visible rows), and the selected question.

const ROW = 58; // pixels
const browser = { runs: [], entries: [], shown: [], selected: 0 };

/** Whether a folder is one of evaluate.py, which has answers but no steps. */
const isEvaluation = (run) => !run.verdict;

/** Where the games come from: "step 20", "validation at step 20", "test". */
const placeOf = ({ kind, step }) => kind === "training" ? `step ${step}` : kind === "validation" ? `validation at step ${step}` : kind;
const gamesOf = (entry) => entry.groups.flatMap((group) => group?.games ?? []);

/** One entry per step and question; an entry has a group of each run. */
function makeEntries(runs) {
  const entries = new Map();
  runs.forEach((run, index) => run.groups.forEach((group) => {
    let key = `${group.kind} ${group.step} ${group.id}`;
    while (entries.get(key)?.groups[index]) key += " again"; // a question may occur twice in a step
    if (!entries.has(key)) entries.set(key, { key, kind: group.kind, step: group.step, groups: runs.map(() => null) });
    entries.get(key).groups[index] = group;
  }));
  return [...entries.values()].sort((a, b) => a.step - b.step);
}

function startBrowser(runs) {
  Object.assign(browser, { runs, entries: makeEntries(runs) });
  const groups = runs.flatMap((run) => run.groups);
  const games = groups.flatMap((group) => group.games);
  if (runs.every(isEvaluation)) $("games-title").textContent = "Answers";
  fillMenu("kind", groups.map((group) => group.kind));
  fillMenu("dataset", groups.map((group) => group.dataset).sort());
  fillMenu("step", groups.map((group) => group.step).sort((a, b) => a - b));
  fillMenu("right", games.map((game) => game.right).filter((right) => right !== null).sort().reverse(), (right) => right ? "✓ right" : "✗ wrong");
  $("step").parentElement.hidden = runs.every(isEvaluation);
  $("kind").parentElement.hidden = $("kind").options.length < 3;
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("input", applyFilters);
  $("filters").addEventListener("reset", () => setTimeout(applyFilters));
  $("list").addEventListener("scroll", () => requestAnimationFrame(drawRows), { passive: true });
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -1e9, End: 1e9 }[event.key];
    if (move) { select(browser.selected + move); event.preventDefault(); }
    if (event.key === "Enter") $("detail").focus();
  });
  new ResizeObserver(drawRows).observe($("list"));
  applyFilters();
}

/** The values of a filter with their counts, in the order of their first appearance. */
function fillMenu(id, values, name = String) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  $(id).append(new Option("all", ""), ...[...counts].map(([value, count]) => new Option(`${plain(name(value))} (${count})`, value)));
}

/** All texts of an entry, in lower case, for the search. */
function textOf(entry) {
  entry.text ??= entry.groups.filter(Boolean).flatMap((group) => [group.question, ...group.answers,
    ...group.games.flatMap((game) => [game.answer ?? "", game.error, game.player, ...game.spans.map((span) => span.text)])]).join("\n").toLowerCase();
  return entry.text;
}

function applyFilters() {
  const kept = browser.shown[browser.selected]?.key;
  const [needle, dataset, step, kind, right] = ["search", "dataset", "step", "kind", "right"].map((id) => $(id).value.trim());
  browser.shown = browser.entries.filter((entry) => (!step || entry.step === Number(step)) && (!kind || entry.kind === kind)
    && (!dataset || entry.groups.find(Boolean).dataset === dataset) && (!right || gamesOf(entry).some((game) => String(game.right) === right)) && textOf(entry).includes(needle.toLowerCase()));
  const games = sum(browser.shown.map((entry) => gamesOf(entry).length));
  $("count").textContent = `${counted(browser.shown.length, "question")}, ${counted(games, browser.runs.every(isEvaluation) ? "answer" : "game")}`;
  $("rows").style.height = `${browser.shown.length * ROW}px`;
  select(Math.max(0, browser.shown.findIndex((entry) => entry.key === kept)));
}

function select(index) {
  browser.selected = Math.min(Math.max(0, index), Math.max(0, browser.shown.length - 1));
  const [list, top] = [$("list"), browser.selected * ROW];
  list.scrollTop = Math.min(top, Math.max(list.scrollTop, top + ROW - list.clientHeight));
  drawRows();
  const entry = browser.shown[browser.selected];
  const empty = browser.entries.length ? "No game matches. Clear the filters." : "This run has no recorded games.";
  $("detail").replaceChildren(...(entry ? drawEntry(entry, browser.runs, $("search").value.trim()) : [element("p", { class: "empty" }, empty)]));
}

function drawRows() {
  const list = $("list");
  const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
  const to = Math.min(browser.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 6);
  $("rows").replaceChildren(...browser.shown.slice(from, to).map((entry, offset) => drawRow(entry, from + offset)));
  list.setAttribute("aria-activedescendant", browser.shown.length ? `row-${browser.selected}` : "");
}

function drawRow(entry, index) {
  const group = entry.groups.find(Boolean);
  const facts = element("div", { class: "facts" }, element("span", {}, placeOf(entry).replace(" at step", "")), element("span", {}, plain(group.dataset, 14)), element("span", { class: "spring" }));
  entry.groups.forEach((own, place) => {
    if (!own) return;
    const letter = browser.runs.length > 1 ? `${LETTERS[place]} ` : "";
    const reward = mean(rewardsOf(own));
    facts.append(element("span", { class: "mean", title: "right answers, and the mean reward" }, `${letter}${tally(own.games)} ${reward === null ? "" : fixed(reward)}`));
  });
  const row = element("div", { class: "row", role: "option", id: `row-${index}`, "aria-selected": String(index === browser.selected),
    "aria-setsize": browser.shown.length, "aria-posinset": index + 1 }, element("div", { class: "ask" }, plain(group.question, 160)), facts);
  Object.assign(row.style, { top: `${index * ROW}px`, height: `${ROW}px` });
  row.addEventListener("click", () => { select(index); if (innerWidth <= 860) $("detail").scrollIntoView({ block: "start" }); });
  return row;
}

/** The right answers of a group: ✓ or ✗ for one game, 3/5 for several, nothing for long texts. */
function tally(games) {
  const [right, all] = [rightOf(games), judged(games).length];
  return all > 1 ? `✓ ${right}/${all}` : all ? (right ? "✓" : "✗") : "";
}
