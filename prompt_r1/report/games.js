// The filters, the list of questions (which holds only the visible rows), and the selected question.

const ROW = 58; // pixels
const browser = { runs: [], entries: [], shown: [], selected: 0, opening: false };

/** One entry per step and question; an entry has a group of each run. */
function makeEntries(runs) {
  const entries = new Map();
  runs.forEach((run, index) => run.groups.forEach((group) => {
    let key = `${group.kind} ${group.step} ${group.id}`;
    while (entries.get(key)?.groups[index]) key += " again"; // a question may occur twice in a step
    if (!entries.has(key)) entries.set(key, { key, kind: group.kind, step: group.step, id: group.id, groups: runs.map(() => null) });
    entries.get(key).groups[index] = group;
  }));
  return [...entries.values()].sort((a, b) => a.step - b.step);
}

/** Whether a folder is one of evaluate.py, which has answers but no steps. */
const isEvaluation = (run) => !run.verdict;

/** Where the games come from: "step 20", "validation at step 20", "test". */
const placeOf = (entry) => entry.kind === "training" ? `step ${entry.step}` : entry.kind === "validation" ? `validation at step ${entry.step}` : entry.kind;

/** The part of an address that names one game, such as #step=20&game=bridge-7/3. */
function linkOf(entry, run, place) {
  const parts = { step: entry.step, ...(entry.kind === "training" ? {} : { of: entry.kind }), ...(run ? { run: LETTERS[run] } : {}) };
  return `#${new URLSearchParams(parts)}&game=${encodeURIComponent(entry.id)}/${place + 1}`;
}

const gamesOf = (entry) => entry.groups.flatMap((group) => group?.games ?? []);
const rewardsOf = (group) => (group?.games ?? []).filter((game) => game.reward).map((game) => game.reward.total);
const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

function startBrowser(runs) {
  browser.runs = runs;
  browser.entries = makeEntries(runs);
  const groups = runs.flatMap((run) => run.groups);
  const count = (values) => [...values.reduce((counts, value) => counts.set(value, (counts.get(value) ?? 0) + 1), new Map())];
  const kinds = count(groups.map((group) => group.kind));
  fill($("kind"), "all", kinds);
  $("kind").parentElement.hidden = kinds.length < 2;
  if (runs.every(isEvaluation)) $("games-title").textContent = "Answers";
  const rewarded = groups.some((group) => rewardsOf(group).length);
  for (const id of ["low", "high", "order"]) $(id).parentElement.hidden = !rewarded;
  fill($("right"), "all", [["true", groups.flatMap((group) => group.games).filter((game) => game.right === true).length], ["false", groups.flatMap((group) => group.games).filter((game) => game.right === false).length]], (value) => value === "true" ? "✓ right" : "✗ wrong");
  fill($("dataset"), "all", count(groups.map((group) => group.dataset)).sort());
  fill($("stop"), "all", count(groups.flatMap((group) => group.games.map((game) => game.stop))).sort((a, b) => b[1] - a[1]), (stop) => END_NAMES[stop] ?? stop);
  const steps = count(groups.map((group) => group.step)).sort((a, b) => a[0] - b[0]);
  fill($("step"), "all", steps);
  $("step").parentElement.hidden = !rewarded && steps.length < 2;
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
  noteCommonQuestions(runs);
  applyFilters();
}

function fill(menu, all, counts, name = (value) => value) {
  menu.append(new Option(all, ""), ...counts.map(([value, count]) => new Option(`${plain(String(name(value)))} (${count})`, value)));
}

/** Keep the address of the selected question, for a link to it. */
function note(entry) {
  try { history.replaceState(null, "", linkOf(entry, entry.groups.findIndex(Boolean), 0)); } catch { /* not allowed for this page */ }
}

/** A function that tests a game against the filters, except the text search, which covers the whole group. */
function gameFilter() {
  const [low, high] = [$("low").value, $("high").value];
  const [stop, right] = [$("stop").value, $("right").value];
  return (game) => (!stop || game.stop === stop) && (!right || String(game.right) === right)
    && (low === "" || (game.reward !== null && game.reward.total >= Number(low) - 1e-9))
    && (high === "" || (game.reward !== null && game.reward.total <= Number(high) + 1e-9));
}

/** All texts of an entry in lower case, joined at the first search. */
function textOf(entry) {
  entry.text ??= entry.groups.filter(Boolean).flatMap((group) => [group.question, ...group.answers,
    ...group.games.flatMap((game) => [game.error, ...game.spans.map((span) => span.text)])]).join("\n").toLowerCase();
  return entry.text;
}

function applyFilters(event) {
  const kept = event?.target === $("order") ? null : browser.shown[browser.selected]?.key;
  const [needle, dataset, step, kind, matches] = [$("search").value.trim().toLowerCase(), $("dataset").value, $("step").value, $("kind").value, gameFilter()];
  browser.shown = browser.entries.filter((entry) => (!step || entry.step === Number(step)) && (!kind || entry.kind === kind)
    && (!dataset || entry.groups.find(Boolean).dataset === dataset)
    && gamesOf(entry).some(matches) && (!needle || textOf(entry).includes(needle)));
  sortShown($("order").value);
  const games = browser.shown.reduce((sum, entry) => sum + gamesOf(entry).filter(matches).length, 0);
  const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  $("count").textContent = `${counted(browser.shown.length, "question")}, ${counted(games, browser.runs.every(isEvaluation) ? "answer" : "game")}`;
  $("rows").style.height = `${browser.shown.length * ROW}px`;
  $("rows").replaceChildren();
  select(Math.max(0, browser.shown.findIndex((entry) => entry.key === kept)));
}

function sortShown(order) {
  const first = (entry) => mean(entry.groups.flatMap(rewardsOf)) ?? 9;
  const spread = (entry) => { const all = entry.groups.flatMap(rewardsOf); return all.length ? Math.max(...all) - Math.min(...all) : -1; };
  const gap = (entry) => { const means = entry.groups.map((group) => mean(rewardsOf(group))).filter((value) => value != null); return means.length > 1 ? Math.max(...means) - Math.min(...means) : -1; };
  const by = { worst: (entry) => first(entry), best: (entry) => -first(entry), spread: (entry) => -spread(entry), gap: (entry) => -gap(entry) }[order];
  if (by) browser.shown = browser.shown.map((entry) => [by(entry), entry]).sort((a, b) => a[0] - b[0]).map(([, entry]) => entry);
}

/** In a comparison without any common question, say so in words. */
function noteCommonQuestions(runs) {
  if (runs.length < 2 || browser.entries.some((entry) => entry.groups.every(Boolean))) return;
  const names = listed(runs.map((run, index) => `${LETTERS[index]} (${plain(run.name)})`));
  const seeds = new Set(runs.map((run) => run.settings.seed));
  const why = seeds.size > 1 ? " Their seeds differ, so they play other questions." : " They played other questions, or other steps are shown.";
  $("no-common").textContent = `${names} have no question of the same step in common.${why} Compare their curves; the games are listed one run after the other in each step.`;
  $("no-common").hidden = false;
}

function select(index) {
  browser.selected = Math.min(Math.max(0, index), Math.max(0, browser.shown.length - 1));
  const list = $("list");
  const top = browser.selected * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  drawRows();
  showSelected();
}

function showSelected() {
  const entry = browser.shown[browser.selected];
  if (!entry) { $("detail").replaceChildren(element("p", { class: "empty" }, browser.entries.length ? "No game matches. Clear the filters with c." : "This run has no recorded games.")); return; }
  const view = { needle: $("search").value.trim(), matches: gameFilter(), opening: browser.opening };
  $("detail").replaceChildren(...drawEntry(entry, browser.runs, view));
}

function drawRows() {
  const list = $("list");
  const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
  const to = Math.min(browser.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 6);
  const rows = browser.shown.slice(from, to).map((entry, offset) => drawRow(entry, from + offset));
  $("rows").replaceChildren(...rows);
  if (browser.shown.length) list.setAttribute("aria-activedescendant", `row-${browser.selected}`);
  else list.removeAttribute("aria-activedescendant");
}

function drawRow(entry, index) {
  const group = entry.groups.find(Boolean);
  const facts = element("div", { class: "facts" }, element("span", {}, placeOf(entry).replace(" at step", "")), element("span", {}, plain(group.dataset, 14)), element("span", { class: "spring" }));
  entry.groups.forEach((own, place) => {
    if (!own) return;
    const rewards = rewardsOf(own);
    const letter = browser.runs.length > 1 ? `${LETTERS[place]} ` : "";
    facts.append(...(own.kind === "evaluation" ? [] : [strip(own)]), element("span", { class: "mean", title: "right answers, and the mean reward" }, letter + tally(own), rewards.length ? ` ${fixed(mean(rewards))}` : ""));
  });
  const row = element("div", { class: "row", role: "option", id: `row-${index}`, "aria-selected": String(index === browser.selected),
    "aria-setsize": browser.shown.length, "aria-posinset": index + 1 }, element("div", { class: "ask" }, plain(group.question, 160)), facts);
  row.style.top = `${index * ROW}px`;
  row.style.height = `${ROW}px`;
  row.addEventListener("click", () => { select(index); note(entry); if (innerWidth <= 860) $("detail").scrollIntoView({ block: "start" }); });
  return row;
}

/** The right answers of a group: ✓ or ✗ for one game, 3/5 for several, nothing for long texts. */
function tally(group) {
  const judged = group.games.filter((game) => game.right !== null && game.stop !== "env_error");
  const right = judged.filter((game) => game.right).length;
  if (!judged.length) return "";
  return judged.length === 1 ? (right ? "✓" : "✗") : `✓ ${right}/${judged.length}`;
}

/** The games of a group as small bars: up and blue is better than its mean, down and orange worse. */
function strip(group) {
  const matches = gameFilter();
  const svg = shape("svg", { class: "strip", width: group.games.length * 9, height: 16, "aria-hidden": "true" }, shape("line", { x1: 0, x2: group.games.length * 9, y1: 8, y2: 8 }));
  group.games.forEach((game, place) => {
    const kind = training(game);
    const tall = kind === "better" || kind === "worse" ? 2 + Math.min(6, 3.4 * Math.abs(game.advantage)) : 2;
    const y = kind === "better" ? 8 - tall : kind === "worse" ? 8 : 7;
    svg.append(kind === "untrained" ? shape("rect", { class: "lost", x: place * 9 + 1.5, y: 4.5, width: 6, height: 7 })
      : shape("rect", { class: `${kind}${matches(game) ? "" : " dim"}`, x: place * 9 + 1, y, width: 7, height: tall }));
  });
  return svg;
}
