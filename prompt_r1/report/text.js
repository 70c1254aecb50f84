"use strict";
// Puts texts of models on the page: through textContent only, with control characters made visible.

const $ = (id) => document.getElementById(id);

const LETTERS = "ABCDEF"; // of the runs of a comparison
const runStyle = (index) => `run-${LETTERS[index].toLowerCase()}`;
/** Names as words: "a", "a and b", "a, b and c". */
const listed = (names) => names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;

/** An element with attributes and children; strings become text. */
function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** An SVG element with attributes and children. */
function shape(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Characters of the Unicode categories that terminal.py escapes too (control, format, surrogate, private,
// unassigned, line and paragraph separators), except tab and line feed. They are shown as U+XXXX.
const HIDDEN = /(?![\t\n])[\p{C}\p{Zl}\p{Zp}]/gu;
const codePoint = (letter) => "U+" + letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
// Tags and stop tokens in the text of the agent, which are dimmed.
const FRAME = /<\|\w{1,40}\|>|<\/?(?:think|interaction_prompt|interaction_response|answer)>/g;
const LONG = 4000; // characters of a text that are shown before "show all"

/** Append a text; matches of `needle` are marked. With `frame`, tags are dimmed. */
function appendText(node, text, needle = "", frame = false) {
  const marks = [];
  if (frame) collect(marks, text, FRAME, "tag");
  collect(marks, text, HIDDEN, "control");
  if (needle) collect(marks, text, new RegExp(needle.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi"), "found");
  marks.sort((a, b) => a.start - b.start || b.end - a.end);
  let end = 0;
  for (const mark of marks) {
    if (mark.start < end) continue;
    node.append(text.slice(end, mark.start));
    const piece = text.slice(mark.start, mark.end);
    node.append(element("span", { class: mark.kind }, mark.kind === "control" ? codePoint(piece) : piece));
    end = mark.end;
  }
  node.append(text.slice(end));
  return node;
}

function collect(marks, text, pattern, kind) {
  for (const match of text.matchAll(pattern)) {
    if (match[0]) marks.push({ start: match.index, end: match.index + match[0].length, kind });
  }
}

/** A text for one line: cut at `length`, with control characters as U+XXXX. */
function plain(text, length = 300) {
  const short = text.length > length ? text.slice(0, length) + "…" : text;
  return short.replace(HIDDEN, (found) => `[${codePoint(found)}]`);
}

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/** Format a number with three or four digits, such as 1.3 × 10⁻⁵ or 12.5k. */
function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) {
    const [mantissa, power] = value.toExponential(1).split("e");
    return `${mantissa} × 10${[...String(Number(power))].map((digit) => SUPERSCRIPT[digit]).join("")}`;
  }
  if (size >= 1e6) return (value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (Number.isInteger(value)) return String(value).replace("-", "−");
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : digits).replace("-", "−");
}

const fixed = (value) => value.toFixed(2).replace("-", "−");
const seconds = (value) => value >= 60 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`
  : value >= 1 ? `${value.toFixed(1)} s` : value >= 0.001 || !value ? `${Math.round(value * 1000)} ms` : `${(value * 1000).toFixed(2)} ms`;
const dollars = (value) => "$" + (value >= 1 ? value.toFixed(2) : value.toFixed(value >= 0.01 ? 4 : 6));
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(2);
