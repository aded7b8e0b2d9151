// What the policy answered: found by text, version, batch and fate, the best and the worst rewarded of a step.

import { failure, h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, number } from "../words.js";
import { address } from "../place.js";
import { table } from "../table.js";
import { tokens } from "../tokens.js";

const LIMIT = 50;
const FATES = ["trained", "masked", "filtered", "dropped", "evicted", "payload_lost", "buried", "cancelled"];
const SORTS = [["", "the newest"], ["reward", "the best rewarded"], ["-reward", "the worst rewarded"], ["length", "the longest"], ["-length", "the shortest"]];
const FIELDS = [["text", "Words"], ["job", "Group"], ["version", "Version", "number"], ["batch", "Batch", "number"], ["dataset", "Dataset"]];

export function samples({ run, asked }) {
  const body = h("div", {}), detail = h("section", { class: "detail", hidden: true, "aria-live": "polite" });
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => load(true) }, "More");
  const note = h("p", { class: "count", role: "status" });
  const inputs = FIELDS.map(([field, name, kind]) => [field, name, h("input", {
    type: kind === "number" ? "number" : "search", min: kind && 0, value: asked[field] ?? "", oninput: later(() => load(false)) })]);
  const fate = h("select", { onchange: () => load(false) }, ["", ...FATES].map((one) => h("option", { value: one }, one || "any")));
  const sort = h("select", { onchange: () => load(false) }, SORTS.map(([value, name]) => h("option", { value }, name)));
  const bar = h("div", { class: "filters" },
    [["sort", "First", sort], ...inputs, ["fate", "Fate", fate]].map(([, name, node]) => h("label", { class: "picker" }, h("span", {}, name), node)));
  let rows = [], next = null, turn = 0;

  async function load(further) {
    const mine = ++turn;
    const wish = Object.fromEntries(inputs.map(([field, , node]) => [field, node.value.trim()]));
    try {
      const found = await get(ofRun(run, "samples"), { ...wish, fate: fate.value, sort: sort.value, limit: LIMIT, after: further ? next : "" });
      if (mine !== turn) return;
      rows = further ? [...rows, ...found.rows] : found.rows;
      next = found.next;
      replace(note, found.problems.map((one) => h("span", { class: "trouble" }, said(one, 300))));
      draw(found.there);
    } catch (error) {
      if (mine === turn) { more.hidden = true; replace(body, failure(error)); }
    }
  }

  function draw(there) {
    more.hidden = !next;
    replace(body, rows.length ? table("Samples", columns, rows, open) : h("p", { class: "none" },
      there ? "No sample is like this." : "This run keeps no history of its samples: set history.enabled, or start `penstock recorder`."));
  }

  const columns = [
    ["Sample", (one) => one.id],
    ["Reward", (one) => number(one.reward, 3), "number"],
    ["Version", (one) => (one.oldest === one.newest ? any(one.newest) : `${one.oldest} to ${one.newest}`), "number"],
    ["Tokens", (one) => number(one.num_generated), "number"],
    ["Fate", (one) => said([one.fate || "open", one.reason].filter(Boolean).join(": "))],
    ["Prompt", (one) => excerpt(one.prompt)],
    ["Answer", (one) => excerpt(one.answer)],
    ["Group", (one) => h("a", { href: address({ run, view: "samples", asked: { job: one.job } }) }, "all of it")],
  ];

  async function open({ id }) {
    detail.hidden = false;
    try {
      replace(detail, shownOf(run, await get(ofRun(run, "sample"), { id }), () => { detail.hidden = true; }));
    } catch (error) {
      replace(detail, failure(error));
    }
    detail.scrollIntoView({ block: "start" });
  }

  load(false);
  return { node: h("section", {}, h("h1", {}, "Samples"), bar, note, detail, body, more), close() {} };
}

const excerpt = (text) => said((text ?? "").replace(/\s+/g, " "), 140);

const FACTS = ["reward", "status", "finish_reason", "fate", "reason", "lane", "oldest", "newest", "prompt_length", "num_generated", "worker",
  "attempts", "crashes", "num_turns", "num_aborts", "cached_tokens", "label"];
const TIMES = ["admitted_s", "leased_s", "first_token_s", "drawn_s", "rewarded_s", "committed_s", "ready_s", "cut_s", "trained_s"];

function shownOf(run, one, onClose) {
  const facts = FACTS.filter((name) => one[name] !== null && one[name] !== "").map((name) => [name.replaceAll("_", " "), one[name]]);
  const rewards = Object.entries(one.reward_info ?? {});
  return [
    h("div", { class: "headed" }, h("h2", {}, "Sample ", said(one.id)), h("button", { type: "button", onclick: onClose }, "Close")),
    h("h3", {}, "Prompt"), h("pre", { class: "text" }, said(one.prompt || "its text is not kept")),
    h("h3", {}, "Answer"), h("pre", { class: "text" }, said(one.answer || "its text is not kept")),
    h("div", { class: "beside" }, facts.length && list(facts), rewards.length && h("div", {}, h("h3", {}, "Reward"), list(rewards)), timesOf(one)),
    one.uses.length ? table("Batches", [
      ["Subscription", (use) => use.subscription], ["Batch", (use) => number(use.batch), "number"], ["Trained at version", (use) => number(use.version), "number"],
      ["Staleness", (use) => (use.staleness < 0 ? "none bore loss" : number(use.staleness)), "number"], ["Tokens with loss", (use) => number(use.loss_tokens), "number"],
    ], one.uses) : null,
    tokens(one),
    h("p", {}, h("a", { href: address({ run, view: "samples", asked: { job: one.job } }) }, "All samples of its group")),
  ];
}

function list(entries) {
  return h("dl", { class: "told" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, said(name)), h("dd", {}, said(any(value), 1000)))));
}

// When it came where, in seconds after its job was admitted or first known.
function timesOf(one) {
  const known = TIMES.filter((name) => one[name] > 0);
  if (!known.length) return null;
  const begin = one[known[0]];
  return h("div", {}, h("h3", {}, "When"), list(known.map((name) => [name.replace(/_s$/, "").replaceAll("_", " "),
    name === known[0] ? new Date(1000 * begin).toISOString().replace("T", " ").slice(0, 19) : `${number(one[name] - begin, 2)} s later`])));
}

function later(act) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, 250); };
}
