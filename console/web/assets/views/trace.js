// What became of a job, when, and who held it: its tries and each sample's stages on one axis of time, and as a table.

import { failure, h, replace, s, said } from "../dom.js";
import { get, ofRun } from "../net.js";
import { address } from "../place.js";
import { table } from "../table.js";
import { any, number } from "../words.js";

const BAR = 16, ROW = 22;
const HINT = "A job (DATASET/EPOCH/LINE), a sample (.../K), a prompt (DATASET/LINE) or a batch (N)";

export function trace({ run, asked }) {
  const body = h("div", { "aria-live": "polite" });
  const input = h("input", { type: "search", value: asked.of ?? "", placeholder: "digits/0/17", size: 28 });
  const form = h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); location.hash = address({ run, view: "trace", asked: { of: input.value.trim() } }); } },
    h("label", { class: "picker" }, h("span", {}, "Of"), input), h("button", { type: "submit" }, "Trace"));

  async function load() {
    if (!asked.of) { replace(body, h("p", { class: "none" }, `${HINT}. Samples and jobs lead here too.`)); return; }
    try {
      replace(body, shownOf(run, await get(ofRun(run, "trace"), { of: asked.of })));
    } catch (error) {
      replace(body, failure(error));
    }
  }

  load();
  return { node: h("section", {}, h("h1", {}, "Trace"), form, body), close() {} };
}

function shownOf(run, { kind, of, told, problems }) {
  const troubles = [...problems, ...(told.problems ?? [])].map((one) => h("p", { class: "trouble" }, said(one, 300)));
  return [troubles, kind === "job" ? jobOf(run, told) : [h("h2", {}, kind === "batch" ? "Batch " : "Prompt ", said(of)), kind === "batch" && batchFacts(told), jobsOf(run, told)]];
}

function jobOf(run, told) {
  const left = told.num_samples - told.samples.length;
  return [
    h("div", { class: "headed" }, h("h2", {}, told.sample ? ["Sample ", said(told.sample)] : ["Job ", said(told.job)]), told.sample
      ? link(run, "trace", { of: told.job }, "all of its job") : link(run, "samples", { job: told.job }, "its samples")),
    h("p", {}, said(`${told.state}, lane ${told.lane}, ${number(told.failed_tries)} failed tries, ${number(told.crashes)} crashes`)),
    told.prompt && h("pre", { class: "text" }, said(told.prompt)),
    h("h3", {}, "When"), waterfall(told), left > 0 && h("p", { class: "count" }, `${number(left)} more samples are not shown.`),
    h("h3", {}, "Batches"),
    table("Batches", [
      ["Batch", (one) => link(run, "trace", { of: `${one.subscription}:${one.batch}` }, `${one.subscription}:${one.batch}`)],
      ["Step", (one) => any(one.step), "number"], ["Trained at version", (one) => (one.version < 0 ? "–" : number(one.version)), "number"],
      ["Samples", (one) => number(one.samples), "number"], ["Staleness", (one) => (one.staleness < 0 ? "–" : number(one.staleness)), "number"],
      ["Tokens with loss", (one) => number(one.loss_tokens), "number"],
    ], told.batches),
    h("h3", {}, "What happened"),
    table("What happened", [
      ["After", (one) => `${number(one.at_s - told.events[0].at_s, 3)} s`, "number"], ["Event", (one) => one.event],
      ["Who", (one) => said(one.who)], ["What", (one) => said(one.what, 200)],
    ], told.events),
  ];
}

// Rows of bars over one axis. Places are shares of the width, so nothing is measured.
function waterfall(told) {
  const known = told.events.map((one) => one.at_s);
  if (!known.length) return h("p", { class: "none" }, "No time is known of it.");
  const stages = told.samples.flatMap((one) => one.stages);
  const begin = Math.min(...known, ...stages.map((one) => one.begin_s));
  const end = Math.max(begin + 0.001, ...known, ...stages.map((one) => one.end_s), ...told.tries.map((one) => one.ended_s));
  const at = (time) => 100 * (Math.min(end, Math.max(begin, time)) - begin) / (end - begin);
  const rows = [
    ...told.tries.map((one) => [`try ${one.number}: ${one.worker}`, [bar(at, one.leased_s, one.ended_s || end, `try-${kindOf(one.end)}`, one.end || "under way")], one.end || "under way"]),
    ...told.samples.map((one) => [`sample ${one.id.slice(told.job.length + 1)}`, one.stages.map((stage) => bar(at, stage.begin_s, stage.end_s, `stage-${stage.name}`, stage.name, stage.name === "paused")), outcome(one)]),
  ];
  return h("div", { class: "waterfall" },
    h("div", { class: "water-row axis" }, h("span", {}), ticks(end - begin), h("span", {})),
    rows.map(([name, bars, note]) => h("div", { class: "water-row" }, h("span", { class: "water-name" }, said(name)), bars_(bars), h("span", { class: "water-note" }, said(note)))),
    h("ul", { class: "legend" }, Object.entries(told.meaning).map(([name, text]) => h("li", {}, s("svg", { width: 12, height: 12, "aria-hidden": true }, s("rect", { width: 12, height: 12, rx: 2, class: `stage-${name}` })), `${name}: ${text}`))));
}

const bars_ = (bars) => s("svg", { class: "bars", width: "100%", height: ROW, "aria-hidden": true }, bars);

function bar(at, from, to, kind, title, thin = false) {
  const height = thin ? 6 : BAR, x = at(from);
  return s("rect", { x: `${x}%`, width: `${Math.max(0.2, at(to) - x)}%`, y: (ROW - height) / 2, height, rx: 2, class: kind }, s("title", {}, `${title}: ${number(to - from, 3)} s`));
}

function ticks(seconds) {
  const marks = [0, 0.25, 0.5, 0.75, 1];
  const anchor = (share) => (share === 0 ? "start" : share === 1 ? "end" : "middle");
  return s("svg", { class: "bars", width: "100%", height: 18, "aria-hidden": true }, marks.map((share) =>
    s("text", { x: `${100 * share}%`, y: 13, class: "tick", "text-anchor": anchor(share) }, `${number(share * seconds, seconds < 10 ? 2 : seconds < 100 ? 1 : 0)} s`)));
}

const kindOf = (end) => (end === "committed" ? "well" : end === "" ? "open" : /^(failed|crashed|reclaimed)/.test(end) ? "gone" : "waits");

function outcome(one) {
  const versions = one.oldest === one.newest ? `v${one.newest}` : `v${one.oldest} to ${one.newest}`;
  return [versions, `reward ${number(one.reward, 2)}`, one.fate || one.reason].filter(Boolean).join(", ");
}

function batchFacts(told) {
  const took = told.step === null ? "its step is not known" : `step ${told.step}: waited ${number(told.wait_s, 2)} s, trained ${number(told.train_s, 2)} s, published ${number(told.publish_s, 2)} s`;
  return h("p", {}, said(`subscription ${told.subscription}, version ${any(told.version)}, ${took}`));
}

function jobsOf(run, { jobs, num_jobs }) {
  return [
    table("Jobs", [
      ["Job", (one) => link(run, "trace", { of: one.job }, one.job)], ["Lane", (one) => one.lane], ["Samples", (one) => number(one.samples), "number"],
      ["Reward", (one) => number(one.reward_mean, 3), "number"], ["Versions", (one) => (one.oldest === one.newest ? any(one.newest) : `${one.oldest} to ${one.newest}`), "number"],
      ["Tries", (one) => number(one.tries), "number"], ["Admitted to ready", (one) => (one.took_s === null ? "–" : `${number(one.took_s, 2)} s`), "number"],
      ["Workers", (one) => said(one.workers, 100)], ["Fate", (one) => said(one.fate)],
    ], jobs),
    num_jobs > jobs.length && h("p", { class: "count" }, `${number(num_jobs - jobs.length)} more are not shown.`),
  ];
}

const link = (run, view, asked, text) => h("a", { href: address({ run, view, asked }) }, said(text));
