// Details of one sample: texts, reward, times, batches, tokens.

import { h, said } from "./dom.js";
import { any, number } from "./words.js";
import { address } from "./place.js";
import { table } from "./table.js";
import { tokens } from "./tokens.js";

const FACTS = ["reward", "status", "finish_reason", "fate", "reason", "lane", "oldest", "newest", "prompt_length", "num_generated", "worker",
  "attempts", "crashes", "num_turns", "num_aborts", "cached_tokens", "label"];
const TIMES = ["admitted_s", "leased_s", "started_s", "first_token_s", "drawn_s", "rewarded_s", "committed_s", "ready_s", "cut_s", "trained_s"];
const NOT_KEPT = "its text is not kept";

export function sample(run, one, onClose) {
  const facts = FACTS.filter((name) => one[name] !== null && one[name] !== "").map((name) => [name.replaceAll("_", " "), one[name]]);
  const rewards = Object.entries(one.reward_info ?? {});
  return [
    h("div", { class: "headed" }, h("h2", {}, "Sample ", said(one.id)), h("button", { type: "button", onclick: onClose }, "Close")),
    h("h3", {}, "Prompt"), h("pre", { class: "text", tabindex: 0 }, said(one.prompt || NOT_KEPT)),
    one.turns.length > 1 ? one.turns.map(turn) :
      [h("h3", {}, "Answer"), h("pre", { class: "text", tabindex: 0 }, said(one.answer || NOT_KEPT))],
    tokens(one),
    h("div", { class: "beside" }, facts.length > 0 && list(facts), rewards.length > 0 && h("div", {}, h("h3", {}, "Reward"), list(rewards)), timesOf(one)),
    one.uses.length ? table("Batches", [
      ["Subscription", (use) => use.subscription], ["Batch", (use) => number(use.batch), "number"], ["Trained at version", (use) => number(use.version), "number"],
      ["Staleness", (use) => (use.staleness < 0 ? "none bore loss" : number(use.staleness)), "number"], ["Tokens with loss", (use) => number(use.loss_tokens), "number"],
    ], one.uses) : null,
    h("p", {}, h("a", { href: address({ run, view: "samples", asked: { job: one.job, by: "group" } }) }, "All samples of its group"), " · ",
      h("a", { href: address({ run, view: "trace", asked: { of: one.id } }) }, "Its trace: who held it, when, and where its time went")),
  ];
}

// A turn of the policy, or the environment's answer to it.
function turn(one) {
  const [oldest, newest] = one.versions ?? [];
  const version = newest === undefined ? "" : `, version ${oldest === newest ? newest : `${oldest} to ${newest}`}`;
  const heading = `${one.by === "policy" ? "Turn" : "Environment"}: ${number(one.tokens)} tokens${version}`;
  return [h("h3", {}, heading), h("pre", { class: "text", tabindex: 0 }, said(one.text ?? NOT_KEPT))];
}

function list(entries) {
  return h("dl", { class: "facts" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, said(name)), h("dd", {}, said(any(value), 1000)))));
}

// Times of its stages, in seconds after the first known one.
function timesOf(one) {
  const known = TIMES.filter((name) => one[name] > 0);
  if (!known.length) return null;
  const begin = one[known[0]];
  return h("div", {}, h("h3", {}, "When"), list(known.map((name) => [name.replace(/_s$/, "").replaceAll("_", " "),
    name === known[0] ? new Date(1000 * begin).toISOString().replace("T", " ").slice(0, 19) : `${number(one[name] - begin, 2)} s later`])));
}
