// A run on one screen: its figures, what waits for what, and the four curves that say how it goes.

import { h, said, replace } from "../dom.js";
import { number, share, short, rate, duration, any } from "../words.js";
import { drawn, read } from "../charts.js";
import { newest } from "../said.js";

const FIRST_CHARTS = ["reward", "held-out", "staleness", "tokens"];
const EVERY_MS = 5000;

export function overview({ run, other }) {
  const figures = h("dl", { class: "figures" }), flow = h("div", { class: "flowing" }), waits = h("div", {}), answers = h("section", {}), grid = h("div", { class: "charts first" });
  let moved = "", asked = 0, close = () => {};

  async function load() {
    asked = Date.now();
    newest(run).then((found) => { if (!answers.contains(document.activeElement)) replace(answers, found); }, () => replace(answers));
    const found = await read(run, other).catch(() => []);
    close();
    const first = FIRST_CHARTS.map((id) => found.find((one) => one.id === id)).filter(Boolean);
    const made = drawn(first, run, other, "step");
    close = made.close;
    replace(grid, made.nodes);
  }

  function update(seen) {
    replace(figures, tiles(seen));
    replace(flow, seen.parts.length ? partsOf(seen) : silence(seen));
    replace(waits, seen.live && waitsOf(seen), notesOf(seen));
    const now = String(seen.moved);
    if (now === moved || Date.now() - asked < EVERY_MS) return;
    moved = now;
    if (!grid.contains(document.activeElement)) load();
  }

  return { node: h("section", { class: "overview" }, h("h1", { class: "unseen" }, "Overview"), figures, flow, h("div", { class: "halves" }, waits, answers), grid), update, close: () => close() };
}

function tiles({ figures }) {
  const of = (value, whole) => (whole ? `${number(value)} of ${number(whole)}` : number(value));
  const worst = typeof figures.staleness_max === "number" ? ` (max ${number(figures.staleness_max)})` : "";
  const each = [
    ["Step", of(figures.step, figures.steps)],
    ["Version", number(figures.version)],
    ["Reward", number(figures.reward, 3)],
    ["Held-out reward", number(figures.held_out, 3)],
    ["Staleness", `${number(figures.staleness_mean, 2)}${worst}`],
    ["Tokens/s", short(figures.tokens_per_s)],
    ["Trainer waits", share(figures.trainer_wait)],
    ["Goodput", typeof figures.goodput === "number" ? share(figures.goodput) : null],
    ["Groups ready", figures.ready],
    ["Dead letters", figures.dead],
    ["Samples trained", figures.samples],
    ["Weight updates", figures.weight_updates],
    ["Audit", figures.audit],
  ].filter(([, value]) => value !== undefined && value !== null);
  return each.map(([name, value]) => h("div", {}, h("dt", {}, name),
    h("dd", {}, typeof value === "number" ? number(value) : said(value, 60))));
}

const TITLES = { producer: "Producer", queue: "Queue", workers: "Workers", buffer: "Buffer", trainer: "Trainer" };
const WORDS = { well: "works", waits: "waits", sick: "blocked", gone: "missing" };

function partsOf({ parts, edges }) {
  const forth = edges.filter((one) => one.from !== "trainer");
  const back = edges.find((one) => one.from === "trainer");
  const line = parts.flatMap((part) => [box(part), forth.filter((one) => one.from === part.id).map(edge)]);
  return h("section", { class: "flow", "aria-label": "What flows between the parts" }, line,
    back && h("div", { class: "back" }, h("span", { class: "arrow", "aria-hidden": "true" }, "↺"),
      h("span", {}, "Weights go back from trainer to workers: ", h("b", {}, rate(back.rate, back.what)),
        back.depth ? `, ${number(back.depth)} ${back.depth === 1 ? "worker is" : "workers are"} behind` : ", every worker has the newest")));
}

function box({ id, is, facts, cause }) {
  return h("section", { class: `part is-${is}${cause ? " is-cause" : ""}`, "data-part": id },
    h("h2", {}, TITLES[id]),
    h("p", { class: "state" }, WORDS[is]),
    h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, said(name)), h("dd", {}, said(any(value), 80))))),
    cause && h("p", { class: "cause" }, h("b", {}, "Cause: "), said(cause, 300)));
}

function edge({ rate: flow, what, depth, of }) {
  return h("div", { class: "edge" }, h("span", { class: "rate" }, rate(flow, what)),
    h("span", { class: "arrow", "aria-hidden": "true" }), h("span", { class: "depth" }, `${number(depth)} ${of}`));
}

function silence({ state, silent }) {
  if (state === "finished") return null;
  return h("p", { class: "silent" }, said(silent, 600));
}

function waitsOf({ chains }) {
  return h("section", { class: "waits" }, h("h2", {}, "Who waits for what"),
    chains.length ? chains.map(chainOf) : h("p", { class: "none" }, "Nobody waits for longer than a moment."));
}

function chainOf({ links, end, at_work: works }) {
  const each = links.map(({ who, what, since_s: since }) => h("li", {},
    h("b", {}, said(who)), ` has waited ${duration(since)} for `, said(what, 500)));
  const last = end && h("li", { class: works ? "end works" : "end" }, said(end, 500));
  if (!last) each.at(-1).className = "end";
  return h("ol", { class: "chain" }, each, last);
}

function notesOf({ notes }) {
  return notes.length ? h("section", { class: "notes" }, h("h2", {}, "Given up and lost"), notes.map((one) => h("p", {}, said(one, 1000)))) : null;
}

