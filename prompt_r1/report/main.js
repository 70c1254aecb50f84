// Starts the page: reads the data, and draws head, curves and games.

function drawHead(runs) {
  const names = runs.map((run) => plain(run.name)).join(" and ");
  const letter = (index) => runs.length > 1 ? `${LETTERS[index]}  ` : "";
  document.title = `Prompt-R1 · ${names}`;
  $("title").textContent = names;
  const values = (name) => [...new Set(runs.map((run) => plain(run.settings[name] ?? "")))].join(", ");
  if (values("agent")) $("subtitle").textContent = `agent ${values("agent")} · environment ${values("env")} · seed ${values("seed")}`;
  if (runs.length > 1) $("run-legend").append(...runs.map((run, index) => element("span", { class: "key" }, runKey(index), letter(index) + plain(run.name))));
  runs.forEach((run, index) => {
    const { verdict, settings, step } = run;
    const progress = Number(settings.steps) > step ? ` Step ${step.toLocaleString("en")} of ${Number(settings.steps).toLocaleString("en")}.` : "";
    if (verdict) $("verdicts").append(element("p", { class: `verdict ${verdict.kind}` }, element("b", {}, letter(index)), verdict.text, progress));
    const name = element("b", {}, runs.length > 1 ? `${letter(index)}${plain(run.name)}  ` : "");
    if (isEvaluation(run)) $("summary").append(name, element("div", { class: "scroll" }, drawSystems(run, index)), element("p", { class: "muted note" }, ABOUT_SYSTEMS));
    else $("summary").append(element("p", { class: "muted" }, name, totalsOf(run)));
    if (run.tables.length) $("summary").append(element("details", {}, element("summary", {}, `${letter(index)}Test by dataset`), ...run.tables.map(drawTable)));
  });
  drawSettings(runs);
}

/** A table of the test. */
function drawTable([header, ...rows]) {
  const line = (name, cells) => element("tr", {}, ...cells.map((cell) => element(name, {}, plain(cell))));
  return element("div", { class: "scroll" }, element("table", { class: "results" }, line("th", header), ...rows.map((row) => line("td", row))));
}

/** What a run has played and spent, in one line. */
function totalsOf(run) {
  const total = (...names) => sum(names.flatMap((name) => pointsOf(run, name)).map((point) => point.value));
  const [spent, lost] = ["env/usd", "env/lost_usd"].map((name) => pointsOf(run, name).at(-1)?.value);
  const calls = { sent: total("env/paid"), "from the journal": total("env/reused"), failed: total("env/errors", "val/errors") };
  return [
    `${counted(sum(run.groups.map((group) => group.games.length)), "game")} of ${run.steps_shown} of ${run.steps} steps`,
    `calls: ${Object.entries(calls).filter(([, count]) => count).map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(" + ") || "none"}`,
    spent ? `cost: ${dollars(spent)}` : "no priced call",
    lost && `at most ${dollars(lost)} more for lost attempts`,
    `time: ${seconds(total("time/rollout", "time/update", "time/validation", "time/save"))}`,
  ].filter(Boolean).join(" · ");
}

/** The settings of config.yaml; those in which two runs differ are bold. */
function drawSettings(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  $("settings").hidden = !names.length;
  $("settings").querySelector("table").append(...names.map((name) => {
    const values = runs.map((run) => plain(run.settings[name] ?? "", 200) || "–");
    return element("tr", { class: new Set(values).size > 1 ? "differs" : "" }, element("td", { class: "muted" }, plain(name)), ...values.map((value) => element("td", {}, value)));
  }));
}

/** Show the games of the step that is nearest. */
function showStep(step) {
  const at = [...$("step").options].map((option) => option.value).filter(Boolean).sort((a, b) => Math.abs(a - step) - Math.abs(b - step));
  $("step").value = at[0] ?? "";
  applyFilters();
  $("games").scrollIntoView({ block: "start" });
}

const runs = JSON.parse($("data").textContent);
$("data").remove();
document.documentElement.classList.toggle("comparing", runs.length > 1);
if (runs.every(isEvaluation)) $("curves").parentElement.hidden = true;
else drawCurves(runs, showStep);
startBrowser(runs);
drawHead(runs);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
