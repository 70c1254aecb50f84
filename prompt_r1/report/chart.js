// Draws one chart: lines with bands (or whiskers, if there are few points), or a stack of shares.

const BOX = { width: 340, height: 172, left: 40, right: 9, top: 9, bottom: 21 };
const FEW = 12; // up to this many points are drawn as dots with whiskers
const charts = []; // all charts of the page, which share one cursor

/** A function that maps values to pixels. */
function scale([low, high], [from, to], log = false) {
  const by = log ? Math.log10 : (value) => value;
  const spread = by(high) - by(low) || 1;
  return (value) => from + ((by(Math.max(value, log ? low : -Infinity)) - by(low)) / spread) * (to - from);
}

/** Round numbers from low to high, in at most `count` steps of 1, 2 or 5 times a power of ten. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
}

function decades(low, high) {
  const [from, to] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
  const every = Math.max(1, Math.ceil((to - from) / 4));
  return Array.from({ length: to - from + 1 }, (_, index) => from + index).filter((power) => (power - from) % every === 0)
    .map((power) => 10 ** power);
}

/**
 * Make the figure of a chart. spec: {title, about, unit?, log?, floor?, ceiling?, reference?, stacked?, onPick(step)},
 * series: [{label, style, points: [{step, value, low?, high?}]}]. `word` names the entry of WORDS for the title.
 */
function drawChart(spec, series, steps) {
  const range = spec.stacked ? [0, spec.share ? 1 : largestSum(series)] : extent(spec, series);
  const x = scale([steps[0], steps[1]], [BOX.left, BOX.width - BOX.right]);
  const y = scale(range, [BOX.height - BOX.bottom, BOX.top], spec.log);
  const name = series.map((one) => one.label).filter(Boolean).join(", ");
  const svg = shape("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": `${spec.title} by step${name ? ": " + name : ""}` });
  drawAxes(svg, spec, range, steps, x, y);
  if (spec.stacked) drawStack(svg, series, x, y);
  else for (const one of series) drawSeries(svg, one, x, y);
  const cursor = shape("line", { class: "cursor", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  svg.append(cursor);
  const readout = element("output", { class: "readout" });
  const unit = spec.unit ? element("span", { class: "unit" }, `, ${spec.unit}`) : "";
  const caption = element("figcaption", {}, element("span", {}, element("span", { class: "name" }, spec.word ? term(spec.word, spec.title) : spec.title), unit), readout);
  const figure = element("figure", { class: "chart", tabindex: "0", "aria-label": spec.title }, caption, element("p", { class: "about" }, spec.about ?? ""), svg);
  if (spec.stacked || series.some((one) => one.style.includes("second"))) figure.append(legendOf(series, spec.stacked));
  const chart = { spec, series, x, cursor, readout };
  charts.push(chart);
  listen(figure, svg, x, steps, spec);
  read(chart, null);
  return figure;
}

function extent(spec, series) {
  const all = series.flatMap((one) => one.points.flatMap((p) => [p.value, p.low ?? p.value, p.high ?? p.value]));
  const values = (spec.log ? all.filter((value) => value > 0) : all).concat(spec.reference ?? []);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (spec.log) return values.length ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)] : [0.1, 1];
  low = Math.min(low, spec.floor ?? low);
  high = Math.max(high, spec.ceiling ?? high);
  return low === high ? [low - (low ? Math.abs(low) * 0.1 : 0), high + (Math.abs(high) * 0.1 || 1)] : [low, high];
}

const largestSum = (series) => Math.max(1e-9, ...series[0].points.map((_, index) => series.reduce((sum, one) => sum + one.points[index].value, 0)));

function drawAxes(svg, spec, range, steps, x, y) {
  for (const tick of spec.log ? decades(...range) : ticks(...range, 4)) {
    svg.append(shape("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: BOX.left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, axisNumber(tick, spec.log)));
  }
  for (const tick of ticks(...steps, 5).filter(Number.isInteger)) {
    svg.append(shape("text", { x: x(tick), y: BOX.height - 6, "text-anchor": "middle" }, String(tick)));
  }
  if (spec.reference) svg.append(shape("line", { class: "reference", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(spec.reference), y2: y(spec.reference) }));
}

function power(value) {
  const [mantissa, exponent] = value.toExponential(0).split("e");
  return `${mantissa}·10${[...String(Number(exponent))].map((digit) => SUPERSCRIPT[digit]).join("")}`;
}

function axisNumber(tick, log) {
  if (log) return tick >= 0.01 && tick <= 100 ? String(tick) : "10" + [...String(Math.round(Math.log10(tick)))].map((digit) => SUPERSCRIPT[digit]).join("");
  const rounded = Number(tick.toPrecision(6));
  return Math.abs(rounded) >= 1000 ? `${rounded / 1000}k` : Math.abs(rounded) < 0.001 && rounded ? power(rounded) : String(rounded);
}

function drawSeries(svg, { style, points }, x, y) {
  const few = points.length <= FEW;
  const bounded = points.filter((p) => p.low !== undefined);
  if (few) {
    for (const p of bounded) svg.append(shape("line", { class: `whisker ${style}`, x1: x(p.step), x2: x(p.step), y1: y(p.low), y2: y(p.high) }));
  } else if (bounded.length) {
    const up = bounded.map((p) => `${x(p.step).toFixed(1)},${y(p.high).toFixed(1)}`);
    const down = bounded.map((p) => `${x(p.step).toFixed(1)},${y(p.low).toFixed(1)}`).reverse();
    svg.append(shape("polygon", { class: `band ${style}`, points: [...up, ...down].join(" ") }));
  }
  // Between steps that lie apart nothing was measured: the points count, and dots only lead the eye.
  const apart = points.some((p, index) => index && p.step - points[index - 1].step > 1);
  svg.append(shape("polyline", { class: `curve ${style}${apart ? " apart" : ""}`, points: points.map((p) => `${x(p.step).toFixed(1)},${y(p.value).toFixed(1)}`).join(" ") }));
  if (few || apart) for (const p of points) svg.append(shape("circle", { class: `dot ${style}`, cx: x(p.step), cy: y(p.value), r: 2.6 }));
}

function drawStack(svg, series, x, y) {
  const below = series[0].points.map(() => 0);
  for (const { style, points } of series) {
    const down = points.map((p, index) => `${x(p.step).toFixed(1)},${y(below[index]).toFixed(1)}`).reverse();
    points.forEach((p, index) => { below[index] += p.value; });
    const up = points.map((p, index) => `${x(p.step).toFixed(1)},${y(below[index]).toFixed(1)}`);
    svg.append(shape("polygon", { class: style, points: [...up, ...down].join(" ") }));
  }
}

function legendOf(series, stacked) {
  const keys = series.filter((one) => one.label).map((one) => {
    const line = shape("svg", { width: 24, height: 8, viewBox: "0 0 24 8" }, shape("line", { class: `curve ${one.style}`, x1: 1, x2: 23, y1: 4, y2: 4 }));
    return element("span", { class: "key" }, stacked ? element("i", { class: `swatch ${one.style}` }) : line, one.label);
  });
  return element("div", { class: "legend" }, ...keys);
}

function listen(figure, svg, x, steps, spec) {
  let at = steps[1];
  const pick = (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * BOX.width - BOX.left) / (BOX.width - BOX.left - BOX.right);
    at = Math.round(steps[0] + Math.min(1, Math.max(0, share)) * (steps[1] - steps[0]));
    moveCursor(at);
  };
  svg.addEventListener("pointermove", pick);
  svg.addEventListener("pointerleave", () => moveCursor(null));
  svg.addEventListener("click", (event) => { pick(event); spec.onPick(at); });
  figure.addEventListener("blur", () => moveCursor(null));
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { at = Math.min(steps[1], Math.max(steps[0], at + move)); moveCursor(at); event.preventDefault(); }
    if (event.key === "Enter") spec.onPick(at);
  });
}

function moveCursor(step) {
  for (const chart of charts) {
    chart.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { chart.cursor.setAttribute("x1", chart.x(step)); chart.cursor.setAttribute("x2", chart.x(step)); }
    read(chart, step);
  }
}

/** Show the values of a chart at a step (of its last point up to there); null: at the end. */
function read(chart, step) {
  const values = chart.series.map((one) => {
    const point = one.points.findLast((p) => step === null || p.step <= step);
    if (!point) return "";
    const interval = point.low === undefined ? "" : ` [${number(point.low, 2)}, ${number(point.high, 2)}]`;
    const name = chart.spec.stacked ? `${one.label} ` : chart.spec.letters ? `${chart.spec.letters[chart.series.indexOf(one)]} ` : "";
    return { point, text: element("span", { class: chart.spec.stacked ? "" : one.style }, name + number(point.value) + interval) };
  }).filter(Boolean);
  const steps = [...new Set(values.map(({ point }) => point.step))];
  const shown = chart.spec.stacked ? values.slice(0, 2) : values;
  const parts = shown.flatMap(({ text }, index) => index ? [" · ", text] : [text]);
  chart.readout.replaceChildren(step === null ? "" : `step ${steps.join(", ")}: `, ...parts);
}
