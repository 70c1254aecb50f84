// The systems of an evaluation: a table that one can sort, with the questions on which two of them disagree.

const MEANS = { em: "EM", f1: "F1", ssim: "SSim", own: "own metric", format: "format", turns: "turns", calls: "calls", usd: "$", n: "questions", errors: "errors" };

const ABOUT_SYSTEMS = "Means with 95 % intervals. Where methods disagree: below ✗, on how many questions the method of the row is right and that of the column is not; a click shows them.";

/** Whether some games of an entry are right and others are not. */
const disagree = (entry) => new Set(judged(gamesOf(entry)).map((game) => game.right)).size > 1;

/** A mean of results.json; a rate with its 95 % interval. */
function drawMean(means, name) {
  const [value, low, high] = [means[name], means[`${name}_low`], means[`${name}_high`]];
  if (value === undefined) return "–";
  if (low === undefined) return number(value);
  return [element("b", {}, value.toFixed(3)), ` [${low.toFixed(2)}, ${high.toFixed(2)}]`];
}

/** A row for each system. A click on a heading sorts by its column; one on a number of questions shows them. */
function drawSystems({ results }, index) {
  const entries = browser.entries.filter((entry) => entry.groups[index]);
  const systems = [...new Set(entries.flatMap((entry) => entry.groups[index].games).map((game) => game.player))];
  const means = Object.keys(MEANS).filter((name) => systems.some((system) => results[system]?.[name]));
  const rightIn = (entry, system) => mean(judged(entry.groups[index].games).filter((game) => game.player === system).map((game) => Number(game.right))) ?? NaN;
  const columns = [{ title: "method", value: (system) => system, draw: (system) => plain(system) }];
  for (const name of means) columns.push({ title: MEANS[name], value: (system) => results[system]?.[name] ?? -1, draw: (system) => drawMean(results[system] ?? {}, name) });
  for (const other of systems) {
    const found = new Map(systems.map((system) => [system, entries.filter((entry) => rightIn(entry, system) > rightIn(entry, other))]));
    const draw = (system) => {
      const button = element("button", {}, String(found.get(system).length));
      button.addEventListener("click", () => pick(new Set(found.get(system)), `${plain(system)} is right, ${plain(other)} is not`));
      return system === other ? "" : button;
    };
    columns.push({ title: `✗ ${plain(other)}`, value: (system) => found.get(system).length, draw });
  }
  return sortableTable(systems, columns);
}

function sortableTable(rows, columns) {
  const body = element("tbody");
  const headings = columns.map(({ title }) => element("th", { scope: "col" }, element("button", {}, title)));
  const sort = ({ value }, heading) => {
    const way = heading.ariaSort === "descending" ? "ascending" : "descending";
    for (const one of headings) one.ariaSort = one === heading ? way : null;
    const sorted = rows.toSorted((a, b) => (value(a) > value(b) ? -1 : value(a) < value(b) ? 1 : 0) * (way === "descending" ? 1 : -1));
    body.replaceChildren(...sorted.map((row) => element("tr", {}, ...columns.map(({ draw }) => element("td", {}, ...[draw(row)].flat())))));
  };
  headings.forEach((heading, place) => heading.addEventListener("click", () => sort(columns[place], heading)));
  sort(columns[1], headings[1]);
  return element("table", { class: "results" }, element("thead", {}, element("tr", {}, ...headings)), body);
}
