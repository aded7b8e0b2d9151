// Line chart as SVG that fits its element, and shows the values at the pointer or by arrow keys.

import { h, s, said, replace } from "./dom.js";
import { short } from "./words.js";

const HEIGHT = 190;
const EDGE = { left: 52, right: 12, top: 10, bottom: 24 };

// Least points of a line that is smoothed (the raw line stays visible); outliers beyond this are cut off.
const MANY = 60;
const FAR = 3;

// lines: [{ name, colour: 0.., dashed, x: [..], y: [..] }], x ascending within a line or nearly so.
export function chart({ title, unit, lines, zero, bound = null, xName, smooth = false }) {
  const drawing = h("div", { class: "drawing" });
  const tip = h("div", { class: "tip", hidden: true });
  const box = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": spoken(title, unit, lines) }, drawing, tip);
  const { range, cut } = yScale(lines, zero, bound);
  const node = h("figure", { class: "chart" },
    h("figcaption", {}, h("span", { class: "title" }, title), h("span", { class: "unit" }, [unit, `over ${xName}s`].filter(Boolean).join(", ")),
      cut !== null && h("span", { class: "unit" }, `highest ${short(cut)}`)),
    box, legend(lines, bound));
  const scale = { x: span(lines.flatMap((one) => one.x)), y: range };
  const places = [...new Set(lines.flatMap((one) => one.x))].sort((a, b) => a - b);
  let width = 0;
  const draw = () => {
    if (!box.clientWidth || box.clientWidth === width) return;
    width = box.clientWidth;
    replace(drawing, picture(lines, scale, bound, width, smooth));
  };
  const watcher = new ResizeObserver(draw);
  watcher.observe(box);
  pointAt({ box, drawing, tip, lines, scale, places, xName, width: () => width });
  return { node, close: () => watcher.disconnect() };
}

function spoken(title, unit, lines) {
  const each = lines.map((one) => `${one.name}: last ${short(one.y.at(-1))}, ` +
    `from ${short(min(one.y))} to ${short(max(one.y))}`);
  return `${title}${unit ? ` (${unit})` : ""}. ${each.join(". ")}`;
}

function legend(lines, bound) {
  if (lines.length < 2 && bound === null) return null;
  const entries = lines.map((one) => h("li", {}, swatch(one), said(one.name, 40)));
  if (bound !== null) entries.push(h("li", {}, swatch({ bound: true }), `bound ${bound}`));
  return h("ul", { class: "legend" }, entries);
}

function swatch(line) {
  return s("svg", { class: "swatch", viewBox: "0 0 18 8", width: 18, height: 8, "aria-hidden": "true" },
    s("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: kind(line) }));
}

const kind = (line) => (line.bound ? "line bound" : `line c${line.colour % 8}${line.dashed ? " dashed" : ""}`);

function picture(lines, scale, bound, width, smooth) {
  const x = place(scale.x, EDGE.left, width - EDGE.right);
  const y = within(scale.y, HEIGHT - EDGE.bottom, EDGE.top);
  const parts = [...yAxis(scale.y, y, width), ...xAxis(scale.x, x)];
  if (bound !== null) parts.push(s("line", { class: "line bound", x1: x(scale.x[0]), x2: x(scale.x[1]), y1: y(bound), y2: y(bound) }));
  for (const one of lines) {
    const many = smooth && one.x.length >= MANY;
    parts.push(s("path", { class: `${kind(one)}${many ? " raw" : ""}`, d: path(one, x, y) }));
    if (many) parts.push(s("path", { class: kind(one), d: path({ ...one, y: smoothed(one.y) }, x, y) }));
  }
  for (const one of lines.filter((line) => line.x.length === 1)) parts.push(dot(one, 0, x, y));
  parts.push(s("g", { class: "pointed" }));
  return s("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, parts);
}

function path(line, x, y) {
  return line.x.map((at, index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(line.y[index]).toFixed(1)}`).join("");
}

function dot(line, index, x, y) {
  return s("circle", { class: `dot c${line.colour % 8}`, cx: x(line.x[index]), cy: y(line.y[index]), r: 3.5 });
}

function yAxis(range, y, width) {
  return ticks(range, 4).flatMap((value) => [
    s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
    s("text", { class: "tick", x: EDGE.left - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)),
  ]);
}

function xAxis(range, x) {
  return ticks(range, 6).map((value) =>
    s("text", { class: "tick", x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, short(value)));
}

// The values at one position: the nearest point of each line.
function pointAt({ box, drawing, tip, lines, scale, places, xName, width }) {
  let at = -1;
  const clear = () => { at = -1; tip.hidden = true; replace(drawing.querySelector(".pointed") ?? h("i")); };
  const show = (index) => {
    const layer = drawing.querySelector(".pointed");
    if (!layer || !places.length) return;
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = place(scale.x, EDGE.left, width() - EDGE.right);
    const y = within(scale.y, HEIGHT - EDGE.bottom, EDGE.top);
    const here = lines.map((line) => [line, nearest(line.x, places[at])]).filter(([, found]) => found >= 0);
    replace(layer, s("line", { class: "cross", x1: x(places[at]), x2: x(places[at]), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      here.map(([line, found]) => dot(line, found, x, y)));
    replace(tip, h("strong", {}, `${xName} ${short(places[at])}`),
      here.map(([line, found]) => h("div", {}, swatch(line), said(line.name, 40), h("b", {}, short(line.y[found])))));
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(x(places[at]) + 10, width() - tip.offsetWidth))}px`;
  };
  box.addEventListener("pointermove", (event) => {
    const inside = event.clientX - box.getBoundingClientRect().left;
    const reach = (inside - EDGE.left) / (width() - EDGE.right - EDGE.left);
    show(nearest(places, scale.x[0] + reach * (scale.x[1] - scale.x[0])));
  });
  box.addEventListener("pointerleave", clear);
  box.addEventListener("blur", clear);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at < 0 ? places.length - 1 : at + step);
  });
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

function place([from, to], begin, end) {
  return (value) => begin + ((value - from) / (to - from)) * (end - begin);
}

// The same, clamped to the chart.
function within([from, to], begin, end) {
  const at = place([from, to], begin, end);
  return (value) => at(Math.max(from, Math.min(to, value)));
}

// Mean of the running means from both ends, so that there is no lag.
export function smoothed(values) {
  const back = running(values.toReversed()).reverse();
  return running(values).map((value, at) => (value + back[at]) / 2);
}

function running(values) {
  const share = Math.min(0.5, 45 / values.length);
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = (1 - share) * sum + share * value;
    weight = (1 - share) * weight + share;
    return sum / weight;
  });
}

const min = (values) => values.reduce((one, other) => Math.min(one, other), Infinity);
const max = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity);

function span(values) {
  const low = min(values), high = max(values);
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}

function yScale(lines, zero, bound) {
  const values = lines.flatMap((one) => one.y);
  const cut = farPeak(values);
  const [low, high] = span(values.map((value) => (cut === null ? value : Math.min(value, cut.most)))
    .concat(zero ? [0] : [], bound === null ? [] : [bound]));
  const room = 0.06 * (high - low);
  return { range: [zero && low >= 0 ? 0 : low - room, high + room], cut: cut?.highest ?? null };
}

// If a few values are so high that the others would be indistinguishable: the upper limit of the axis, and the highest.
function farPeak(values) {
  if (values.length < MANY) return null;
  const sorted = values.toSorted((a, b) => a - b);
  const usual = sorted[Math.floor(0.995 * (sorted.length - 1))], highest = sorted.at(-1);
  return usual > 0 && highest > FAR * usual ? { most: 1.3 * usual, highest } : null;
}

// About `count` round numbers within a range.
export function ticks([low, high], count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : Number(value.toPrecision(12)));
  }
  return found;
}
