// The filters, the list of questions, and the selected question.

const browser = { runs: [], entries: [], shown: [], entry: null, picked: null }; // picked: the entries that a click has chosen

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
  const mixed = browser.entries.filter(disagree).length;
  if (mixed) $("right").append(new Option(`${runs.every(isEvaluation) ? "methods" : "games"} disagree (${mixed})`, "disagree"));
  $("step").parentElement.hidden = runs.every(isEvaluation);
  $("kind").parentElement.hidden = $("kind").options.length < 3;
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("input", applyFilters);
  $("filters").addEventListener("reset", () => setTimeout(() => pick(null)));
  $("tint").addEventListener("input", () => select(browser.shown.indexOf(browser.entry)));
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -1e9, End: 1e9 }[event.key];
    if (move) { select(browser.shown.indexOf(browser.entry) + move); browser.entry?.row.scrollIntoView({ block: "nearest" }); event.preventDefault(); }
    if (event.key === "Enter") $("detail").focus();
  });
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
  const [needle, dataset, step, kind, right] = ["search", "dataset", "step", "kind", "right"].map((id) => $(id).value.trim());
  const answers = (entry) => !right || (right === "disagree" ? disagree(entry) : gamesOf(entry).some((game) => String(game.right) === right));
  browser.shown = browser.entries.filter((entry) => (!browser.picked || browser.picked.has(entry)) && (!step || entry.step === Number(step)) && (!kind || entry.kind === kind)
    && (!dataset || entry.groups.find(Boolean).dataset === dataset) && answers(entry) && textOf(entry).includes(needle.toLowerCase()));
  const games = sum(browser.shown.map((entry) => gamesOf(entry).length));
  $("count").textContent = `${counted(browser.shown.length, "question")}, ${counted(games, browser.runs.every(isEvaluation) ? "answer" : "game")}${browser.picked ? `: ${browser.label}` : ""}`;
  drawRewards();
  $("list").replaceChildren(...browser.shown.map((entry) => entry.row ??= drawRow(entry)));
  select(browser.shown.indexOf(browser.entry));
}

/** Show only these entries; null: all. */
function pick(entries, label) {
  Object.assign(browser, { picked: entries, label });
  applyFilters();
  if (entries) $("games").scrollIntoView({ block: "start" });
}

/** A histogram of the rewards of the games that the filters leave, on the axis of all games. */
function drawRewards() {
  const rewards = (entries) => browser.runs.map((_, index) => entries.flatMap(({ groups }) => groups[index] ? rewardsOf(groups[index]) : []));
  const all = rewards(browser.entries).flat();
  if (all.length) $("rewards").replaceChildren(drawHistogram(rewards(browser.shown), [Math.min(...all), Math.max(...all)]));
}

function select(index) {
  browser.entry?.row.setAttribute("aria-selected", "false");
  const entry = browser.entry = browser.shown[Math.min(Math.max(0, index), browser.shown.length - 1)];
  entry?.row.setAttribute("aria-selected", "true");
  if (entry) drawTintLegend(entry.kind);
  const empty = browser.entries.length ? "No game matches. Clear the filters." : "This run has no recorded games.";
  $("detail").replaceChildren(...(entry ? drawEntry(entry, browser.runs, $("search").value.trim()) : [element("p", { class: "empty" }, empty)]));
}

function drawRow(entry) {
  const group = entry.groups.find(Boolean);
  const facts = element("div", { class: "facts" }, element("span", {}, placeOf(entry).replace(" at step", "")), element("span", {}, plain(group.dataset, 14)), element("span", { class: "spring" }));
  entry.groups.forEach((own, place) => {
    if (!own) return;
    const letter = browser.runs.length > 1 ? `${LETTERS[place]} ` : "";
    const reward = mean(rewardsOf(own));
    facts.append(element("span", { class: "mean", title: "right answers, and the mean reward" }, `${letter}${tally(own.games)} ${reward === null ? "" : fixed(reward)}`));
  });
  const row = element("div", { class: "row", role: "option", "aria-selected": "false" }, element("div", { class: "ask" }, plain(group.question, 160)), facts);
  row.addEventListener("click", () => { select(browser.shown.indexOf(entry)); if (innerWidth <= 860) $("detail").scrollIntoView({ block: "start" }); });
  return row;
}

/** The right answers of a group: ✓ or ✗ for one game, 3/5 for several, nothing for long texts. */
function tally(games) {
  const [right, all] = [rightOf(games), judged(games).length];
  return all > 1 ? `✓ ${right}/${all}` : all ? (right ? "✓" : "✗") : "";
}
