// Draws one chart: lines with bands.

const BOX = { width: 340, height: 172, left: 40, right: 331, top: 9, bottom: 151 };
const FEW = 12; // up to this many points are drawn as dots too
const charts = []; // all charts of the page, which share one cursor

/** A function that maps values to pixels. */
function scale([low, high], [from, to], log = false) {
  const by = log ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
  return (value) => Number((from + (by(value) - by(low)) / (by(high) - by(low) || 1) * (to - from)).toFixed(1));
}

/** Round numbers from low to high, in at most `count` steps of 1, 2 or 5 times a power of ten. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
}

/**
 * The figure of a chart. spec: {title, about, word, unit, log, floor, ceiling, reference, onPick(step)};
 * series: [{label, style, points: [{step, value, low, high}]}]; steps: the first and the last.
 */
function drawChart(spec, series, steps) {
  const range = extent(spec, series);
  const [x, y] = [scale(steps, [BOX.left, BOX.right]), scale(range, [BOX.bottom, BOX.top], spec.log)];
  const svg = shape("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": `${spec.title} by step` });
  drawAxes(svg, spec, range, steps, x, y);
  for (const one of series) drawSeries(svg, one, x, y);
  const cursor = shape("line", { class: "cursor", y1: BOX.top, y2: BOX.bottom, visibility: "hidden" });
  svg.append(cursor);
  const readout = element("output", { class: "readout" });
  const name = element("span", { class: "name" }, spec.word ? term(spec.word, spec.title) : spec.title);
  const unit = element("span", { class: "unit" }, spec.unit ? `, ${spec.unit}` : "");
  const figure = element("figure", { class: "chart", "aria-label": spec.title },
    element("figcaption", {}, element("span", {}, name, unit), readout), element("p", { class: "about" }, spec.about ?? ""), svg);
  if (series.some((one) => one.label)) figure.append(legendOf(series));
  charts.push({ series, x, cursor, readout });
  listen(svg, steps, spec.onPick);
  read(charts.at(-1), null);
  return figure;
}

/** How many values lie in each of 20 parts of the range, for each series (one of each run). */
function drawHistogram(series, [low, high]) {
  const width = (high - low) / 20 || 0.05;
  const counts = series.map((values) => {
    const parts = Array(20).fill(0);
    for (const value of values) parts[Math.min(19, Math.floor((value - low) / width))] += 1;
    return parts;
  });
  const [range, highest] = [[low, low + 20 * width], [0, Math.max(1, ...counts.flat())]];
  const [x, y] = [scale(range, [BOX.left, BOX.right]), scale(highest, [BOX.bottom, BOX.top])];
  const svg = shape("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": "rewards" });
  drawAxes(svg, {}, highest, range, x, y);
  counts.forEach((parts, index) => parts.forEach((count, part) => {
    const from = low + part * width;
    const bar = (x(from + width) - x(from) - 1) / series.length;
    svg.append(shape("rect", { class: `dot run-${LETTERS[index]}`, x: x(from) + index * bar, width: bar, y: y(count), height: BOX.bottom - y(count) },
      shape("title", {}, `${counted(count, "game")} with ${fixed(from)} to ${fixed(from + width)}`)));
  }));
  const centre = mean(series.flat());
  return element("figure", { class: "chart" }, element("figcaption", {}, element("span", { class: "name" }, "Rewards"),
    element("span", { class: "readout" }, `${counted(series.flat().length, "game")}${centre === null ? "" : `, mean ${fixed(centre)}`}`)), svg);
}

/** The lowest and the highest value of the vertical axis. */
function extent(spec, series) {
  const all = series.flatMap((one) => one.points.flatMap((p) => [p.value, p.low ?? p.value, p.high ?? p.value]));
  const values = (spec.log ? all.filter((value) => value > 0) : all).concat(spec.reference ?? []);
  if (spec.log && !values.length) return [0.1, 1];
  const low = Math.min(...values, spec.floor ?? Infinity);
  const high = Math.max(...values, spec.ceiling ?? -Infinity);
  if (spec.log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
  return low === high ? [low - 0.1 * Math.abs(low), high + (0.1 * Math.abs(high) || 1)] : [low, high];
}

function drawAxes(svg, spec, range, steps, x, y) {
  const powers = () => ticks(...range.map(Math.log10), 4).filter(Number.isInteger);
  for (const tick of spec.log ? powers().map((power) => 10 ** power) : ticks(...range, 4)) {
    svg.append(shape("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: BOX.left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, axisNumber(tick)));
  }
  for (const tick of ticks(...steps, 5).filter(Number.isInteger)) {
    svg.append(shape("text", { x: x(tick), y: BOX.height - 6, "text-anchor": "middle" }, String(tick)));
  }
  const { reference: at } = spec;
  if (at) svg.append(shape("line", { class: "reference", x1: BOX.left, x2: BOX.right, y1: y(at), y2: y(at) }));
}

const axisNumber = (tick) => tick && (Math.abs(tick) < 0.001 || tick >= 1e4) ? number(tick).replace("1.0e", "1e") : String(Number(tick.toPrecision(6)));

function drawSeries(svg, { style, points }, x, y) {
  const bounded = points.filter((p) => p.low !== undefined);
  const path = (all, key) => all.map((p) => `${x(p.step)},${y(p[key])}`);
  svg.append(shape("polygon", { class: `band ${style}`, points: [...path(bounded, "high"), ...path(bounded, "low").reverse()].join(" ") }));
  // Between steps that lie apart nothing was measured: the points count, and dots only lead the eye.
  const apart = points.some((p, index) => index && p.step - points[index - 1].step > 1);
  svg.append(shape("polyline", { class: `curve ${style}${apart ? " apart" : ""}`, points: path(points, "value").join(" ") }));
  if (apart || points.length <= FEW) for (const p of points) svg.append(shape("circle", { class: `dot ${style}`, cx: x(p.step), cy: y(p.value), r: 2.6 }));
}

function legendOf(series) {
  const line = (style) => shape("svg", { width: 24, height: 8 }, shape("line", { class: `curve ${style}`, x1: 1, x2: 23, y1: 4, y2: 4 }));
  return element("div", { class: "legend" }, ...series.map(({ label, style }) =>
    element("span", { class: "key" }, line(style), label)));
}

/** Pointing at a chart moves the cursor of all charts; a click shows the games of the step. */
function listen(svg, [first, last], onPick) {
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) / box.width * BOX.width;
    const step = Math.round(first + (pixel - BOX.left) / (BOX.right - BOX.left) * (last - first));
    return Math.min(last, Math.max(first, step));
  };
  svg.addEventListener("pointermove", (event) => moveCursor(stepAt(event)));
  svg.addEventListener("click", (event) => onPick(stepAt(event)));
  svg.addEventListener("pointerleave", () => moveCursor(null));
}

function moveCursor(step) {
  for (const chart of charts) {
    chart.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(step));
    read(chart, step);
  }
}

/** Show the values of a chart at a step (of its last point up to there); null: at the end. */
function read({ series, readout }, step) {
  const found = series.map((one) => ({ ...one, point: one.points.findLast((p) => step === null || p.step <= step) }))
    .filter(({ point }) => point);
  const values = found.flatMap(({ style, point }, index) => {
    const interval = point.low === undefined ? "" : ` [${number(point.low, 2)}, ${number(point.high, 2)}]`;
    return [index ? " · " : "", element("span", { class: style }, number(point.value) + interval)];
  });
  const steps = [...new Set(found.map(({ point }) => point.step))];
  readout.replaceChildren(step === null ? "" : `step ${steps.join(", ")}: `, ...values);
}
