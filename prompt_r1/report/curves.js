// The curves of the page, in order, with their descriptions.

const END_NAMES = { answered: "answered", max_turns: "turn limit", max_tokens: "token limit", malformed: "malformed", env_error: "environment failed" };

const FAMILIES = [
  ["Does it learn?", [
    { title: "Validation EM", word: "EM", names: ["val/em"], floor: 0, ceiling: 1, about: "Share of exactly right answers in greedy games of held-out questions." },
    { title: "Reward", word: "reward", names: ["reward/mean"], ceiling: 1, about: "Mean of the sampled games. The answer counts only in games of the right form." },
    { title: "Sampled EM", word: "EM", names: ["em", "em/any"], labels: ["of a game", "of the best game of a question"], floor: 0, ceiling: 1, about: "Does training teach, or choose? At the end the first curve may have reached the start of the second: what some game could do before." },
    { title: "Well-formed games", word: "well-formed", names: ["format"], floor: 0, ceiling: 1, about: "Share of games with a think block and one action in every turn, and an answer in the last." },
    { title: "Parts of the reward", word: "format", names: ["reward/format", "reward/answer"], labels: ["format (eq. 12)", "answer (eq. 14)"], floor: 0, about: "A falling format with a rising answer is a sign of reward hacking." },
    { title: "Groups without spread", word: "spread", names: ["groups/no_spread"], floor: 0, ceiling: 1, about: "Share of questions whose games all have the same reward: nothing is learned from them. Normal once most are right." },
  ]],
  ["How does it play?", [
    { title: "Answered games", names: ["stop/answered"], floor: 0, ceiling: 1, about: "Share of games that ended with an answer." },
    { title: "Turns", names: ["turns"], floor: 1, unit: "per game", about: "At 1, the agent answers without asking." },
    { title: "Tokens", word: "token", names: ["tokens/game"], floor: 0, unit: "per game", about: "Written and read." },
  ]],
  ["Is the training healthy?", [
    { title: "Log-probability gap", word: "log-probability gap", names: ["engine/logprob_gap", "engine/logprob_gap_p99", "engine/logprob_gap_mean"], labels: ["largest", "99 %", "mean"], log: true, unit: "nats", reference: 1e-4, about: "Engine against trainer. In float32 it should stay below the line." },
    { title: "KL to the start", word: "KL", names: ["kl", "kl_median"], labels: ["mean", "median"], log: true, unit: "nats per token", about: "Single tokens can make the mean jump; the median should not rise." },
    { title: "Entropy", word: "entropy", names: ["entropy"], floor: 0, unit: "nats per token", about: "Near 0 there is no exploration." },
    { title: "Gradient norm", word: "gradient norm", names: ["grad_norm"], floor: 0, about: "Before clipping." },
    { title: "Lost groups", word: "group", names: ["groups/dropped"], floor: 0, ceiling: 1, unit: "share", about: "Dropped because calls of the environment failed." },
  ]],
  ["What does it cost?", [
    { title: "Time of a step", names: ["time/rollout", "time/update"], labels: ["rollout", "update"], floor: 0, unit: "s", about: "Validation and saving are among the other curves." },
    { title: "Calls", word: "journal", names: ["env/paid", "env/reused"], labels: ["sent", "from the journal"], floor: 0, unit: "per step", about: "Of training and validation games to the environment." },
    { title: "Spent", names: ["env/usd", "env/lost_usd"], labels: ["on replies", "at most, on lost attempts"], floor: 0, unit: "$", about: "Total of the run so far." },
  ]],
];

/** The points of a metric, at the steps where it was measured. */
function pointsOf({ metrics }, name) {
  const [values, low, high] = [metrics[name] ?? [], metrics[`${name}_low`], metrics[`${name}_high`]];
  return values.map((value, index) => ({ step: metrics.step[index], value, low: low?.[index] ?? undefined, high: high?.[index] ?? undefined }))
    .filter((point) => point.value !== null);
}

function drawCurves(runs, onPick) {
  const all = runs.flatMap((run) => run.metrics.step ?? []);
  if (!all.length) { $("curves").append(element("p", { class: "empty" }, "No step has been logged yet.")); return; }
  const steps = [Math.min(...all), Math.max(...all, Math.min(...all) + 1)];
  const draw = (spec) => figuresOf({ ...spec, onPick }, runs, steps);
  for (const [title, specs] of FAMILIES) {
    const figures = specs.flatMap(draw);
    if (figures.length) $("curves").append(element("div", { class: "family" }, element("h3", {}, title), element("div", { class: "charts" }, ...figures)));
  }
  const drawn = new Set(FAMILIES.flatMap(([, specs]) => specs.flatMap((spec) => spec.names)));
  const others = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !drawn.has(name) && !/^step$|_(low|high)$/.test(name)).sort();
  if (!others.length) return;
  const panel = element("div", { class: "charts" });
  const details = element("details", { class: "family" }, element("summary", {}, `${others.length} more curves`), panel);
  details.addEventListener("toggle", () => panel.childElementCount || panel.append(...others.flatMap((name) => draw({ title: plain(name), names: [name] }))));
  $("curves").append(details);
}

/** The chart of a spec with the curves of all runs; none if nothing was measured. */
function figuresOf(spec, runs, steps) {
  const letter = (index) => runs.length > 1 ? ` · ${LETTERS[index]}` : "";
  const series = runs.flatMap((run, index) => spec.names.map((name, place) => ({
    label: spec.labels ? spec.labels[place] + letter(index) : "",
    style: `run-${LETTERS[index]}${place ? " second" : ""}`,
    points: pointsOf(run, name),
  }))).filter((one) => one.points.length);
  return series.length ? [drawChart(spec, series, steps)] : [];
}
