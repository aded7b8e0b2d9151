// What the policy answered: found by text, version, batch and fate; by group; the best and the worst rewarded of a step.

import { failure, h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, number } from "../words.js";
import { chip, groups, inLine, shadesOf } from "../answers.js";
import { address } from "../place.js";
import { sample } from "../sample.js";
import { table } from "../table.js";

const LIMIT = 50;
const FATES = [["", "settled"], ...["trained", "masked", "evaluated", "scored", "filtered", "dropped", "evicted", "payload_lost", "buried", "cancelled"].map((one) => [one, one]),
  ["open", "still open"]];
const LANES = [["", "all"], ["train", "train"], ["eval", "eval"], ["score", "score"]];
const SORTS = [["", "the newest"], ["reward", "the best rewarded"], ["-reward", "the worst rewarded"], ["length", "the longest"], ["-length", "the shortest"]];
const FIELDS = [["text", "Words"], ["job", "Group"], ["version", "Version", "number"], ["batch", "Batch", "number"], ["dataset", "Dataset"]];
const SHAPES = { list: "One by one", group: "By group" };

export function samples({ run, asked }) {
  const body = h("div", {}), detail = h("section", { class: "detail", hidden: true, "aria-live": "polite" });
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => load(true) }, "More");
  const note = h("p", { class: "count", role: "status" });
  const inputs = FIELDS.map(([field, name, kind]) => [field, name, h("input", {
    type: kind === "number" ? "number" : "search", min: kind && 0, value: asked[field] ?? "", oninput: later(() => load(false)) })]);
  const batch = inputs.find(([field]) => field === "batch")[2];
  const fate = choice(FATES, asked.fate), sort = choice(SORTS, asked.sort), lane = choice(LANES, asked.lane);
  const shapes = Object.entries(SHAPES).map(([value, name]) => h("button", { type: "button", onclick: () => shapeAs(value) }, name));
  const bar = h("div", { class: "filters" },
    h("div", { class: "choice", role: "group", "aria-label": "How samples are shown" }, shapes),
    [["sort", "First", sort], ...inputs, ["fate", "Fate", fate], ["lane", "Lane", lane]].map(([, name, node]) => h("label", { class: "picker" }, h("span", {}, name), node)),
    h("span", { class: "choice", role: "group", "aria-label": "Which batch" },
      step("‹", "The batch before", -1), h("button", { type: "button", onclick: newest }, "Newest batch"), step("›", "The batch after", 1)));
  let rows = [], next = null, turn = 0, there = true, shape = asked.by in SHAPES ? asked.by : "list";

  function choice(values, chosen = "") {
    return h("select", { onchange: () => load(false) }, values.map(([value, name]) => h("option", { value, selected: value === chosen }, name)));
  }

  function step(sign, name, by) {
    return h("button", { type: "button", "aria-label": name, onclick: () => (batch.value ? ofBatch(Number(batch.value) + by) : newest()) }, sign);
  }

  function ofBatch(wanted) {
    batch.value = String(Math.max(1, wanted));
    load(false);
  }

  async function newest() {
    try {
      const found = await get(ofRun(run, "newest"));
      if (found.batch !== null) ofBatch(found.batch);
    } catch (error) {
      replace(note, failure(error));
    }
  }

  function shapeAs(wanted) {
    shape = wanted;
    draw();
  }

  async function load(further) {
    const mine = ++turn;
    const wish = Object.fromEntries(inputs.map(([field, , node]) => [field, node.value.trim()]));
    try {
      const found = await get(ofRun(run, "samples"), { ...wish, fate: fate.value, lane: lane.value, sort: sort.value, limit: LIMIT, after: further ? next : "" });
      if (mine !== turn) return;
      rows = further ? [...rows, ...found.rows] : found.rows;
      next = found.next;
      there = found.there;
      replace(note, found.problems.map((one) => h("span", { class: "trouble" }, said(one, 300))));
      draw();
    } catch (error) {
      if (mine === turn) { more.hidden = true; replace(body, failure(error)); }
    }
  }

  function draw() {
    more.hidden = !next;
    shapes.forEach((button, at) => button.setAttribute("aria-pressed", String(Object.keys(SHAPES)[at] === shape)));
    if (!rows.length) {
      replace(body, h("p", { class: "none" },
        there ? "No sample is like this." : "This run keeps no history of its samples: set history.enabled, or start `penstock recorder`."));
    } else replace(body, shape === "group" ? groups(rows, open) : table("Samples", columns(), rows, open));
  }

  function columns() {
    const shade = shadesOf(rows.map((one) => one.reward));
    return [
      ["Sample", (one) => one.id],
      ["Reward", (one) => chip(one.reward, shade), "number"],
      ["Prompt", (one) => inLine(one.prompt)],
      ["Answer", (one) => inLine(one.answer)],
      ["Version", (one) => (one.oldest === one.newest ? any(one.newest) : `${one.oldest} to ${one.newest}`), "number"],
      ["Tokens", (one) => number(one.num_generated), "number"],
      ["Fate", (one) => said([one.fate || "open", one.reason].filter(Boolean).join(": "))],
      ["Group", (one) => h("a", { href: address({ run, view: "samples", asked: { job: one.job, by: "group" } }) }, "all of it")],
    ];
  }

  async function open({ id }) {
    detail.hidden = false;
    try {
      replace(detail, sample(run, await get(ofRun(run, "sample"), { id }), () => { detail.hidden = true; }));
    } catch (error) {
      replace(detail, failure(error));
    }
    detail.scrollIntoView({ block: "start" });
  }

  load(false);
  if (asked.id) open(asked);
  return { node: h("section", {}, h("h1", {}, "Samples"), bar, note, detail, body, more), close() {} };
}

function later(act) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, 250); };
}
