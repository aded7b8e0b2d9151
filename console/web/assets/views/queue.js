// The queue: its lanes, the jobs of each state, and those that were buried.

import { act, allowed, tokenBar } from "../acts.js";
import { failure, h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, duration, number } from "../words.js";
import { pages } from "../pages.js";
import { address } from "../place.js";
import { table } from "../table.js";

const STATES = ["queued", "leased", "delayed", "dead", "ready", "retiring"];
const EVERY_MS = 3000;

export function queue({ run }) {
  const lanes = h("div", {}), detail = h("section", { class: "detail", hidden: true, "aria-live": "polite" });
  const open = (row) => showJob(run, row.job, detail);
  const jobs = pages({
    run, noun: "jobs", name: "Jobs", onRow: open,
    filters: [{ name: "State", field: "state", values: STATES }, { name: "Job", field: "job" }, { name: "Worker", field: "worker" }],
    columns: [
      ["Job", (one) => one.job], ["State", (one) => one.state], ["Lane", (one) => one.lane || one.home],
      ["Done", (one) => `${any(one.committed ?? 0)} of ${any(one.n)}`, "number"],
      ["First version", (one) => any(one.version), "number"], ["Tries", (one) => any(one.attempts ?? 0), "number"],
      ["Crashes", (one) => any(one.crashes ?? 0), "number"], ["Worker", (one) => one.worker],
    ],
  });
  const dead = pages({
    run, noun: "dead", name: "Dead letters", onRow: open, sort: "-buried_ms", limit: 10,
    filters: [{ name: "Reason", field: "reason" }, { name: "Job", field: "job" }],
    columns: [
      ["Job", (one) => one.job], ["Reason", (one) => one.reason], ["Tries", (one) => any(one.attempts), "number"],
      ["Crashes", (one) => any(one.crashes), "number"],
      ["Buried", (one) => `${duration(Date.now() / 1000 - one.buried_ms / 1000)} ago`, "number"],
      ["What it said", (one) => said(lastLine(one.detail), 160)],
      ...(allowed() ? [["", (one) => deadActs(run, one.job, anew)]] : []),
    ],
  });
  let asked = 0;

  function anew() {
    jobs.anew();
    dead.anew();
    look();
  }

  function look() {
    asked = Date.now();
    get(ofRun(run, "lanes")).then((found) => replace(lanes, lanesOf(run, found, anew)), () => replace(lanes));
  }

  return {
    node: h("section", {}, h("h1", {}, "Queue"), tokenBar(), lanes,
      detail, h("h2", {}, "Dead letters"), dead.node, h("h2", {}, "Jobs"), jobs.node),
    update(seen) {
      jobs.update(seen);
      dead.update(seen);
      if (!seen.live) replace(lanes);
      else if (Date.now() - asked >= EVERY_MS && !lanes.contains(document.activeElement)) look();
    },
    close() {},
  };
}

function lanesOf(run, { lanes, delayed, dead, kept, inflight }, anew) {
  const columns = [
    ["Lane", (one) => one.lane], ["Queued", (one) => number(one.queued), "number"],
    ["Leased", (one) => number(one.leased), "number"], ["Ready", (one) => number(one.ready), "number"],
    ["Oldest has waited", (one) => duration(one.oldest_s), "number"],
    ["Open", (one) => (one.paused ? "paused" : "yes")],
    ...(allowed() ? [["", (one) => laneAct(run, one, anew)]] : []),
  ];
  const rest = `${number(delayed)} tried again later, ${number(dead)} dead, ${number(inflight)} in flight, ${number(kept)} complete groups kept`;
  return [table("Lanes", columns, lanes), h("p", { class: "count" }, rest)];
}

function laneAct(run, { lane, paused }, then) {
  return act({
    run, path: "lane", name: paused ? "Resume" : "Pause", wish: { lane, closed: !paused }, then,
    tell: ({ changed }) => `Lane ${lane} ${changed ? (paused ? "is resumed" : "is paused") : "was so already"}.`,
  });
}

function deadActs(run, job, then) {
  const tell = (what) => ({ done }) => (done.length ? `Job ${job} ${what}.` : `Job ${job} is not buried any more.`);
  const jobs = [job];
  return h("span", { class: "acts" },
    act({ run, path: "dead", name: "Requeue", wish: { do: "requeue", jobs }, tell: tell("is queued again"), then }),
    act({ run, path: "dead", name: "Purge", wish: { do: "purge", jobs }, tell: tell("is given up"), then,
      ask: `Give job ${job} up for good?` }));
}

const lastLine = (text) => (text ?? "").trim().split("\n").at(-1);

async function showJob(run, job, detail) {
  detail.hidden = false;
  try {
    const found = await get(ofRun(run, "job"), { id: job });
    replace(detail, h("div", { class: "headed" }, h("h2", {}, "Job ", said(job)),
      h("a", { href: address({ run, view: "trace", asked: { of: job } }) }, "Trace it"),
      h("button", { type: "button", onclick: () => { detail.hidden = true; } }, "Close")), told(found));
  } catch (error) {
    replace(detail, failure(error));
  }
  detail.scrollIntoView({ block: "nearest" });
}

// Nested values as lists of names and values; long texts keep their lines.
export function told(value) {
  if (value === null || typeof value !== "object") return said(any(value), 4000);
  if (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object")) return said(any(value), 4000);
  const entries = Object.entries(value).filter(([, one]) => one !== null && one !== "");
  return h("dl", { class: "facts" }, entries.map(([name, one]) =>
    h("div", {}, h("dt", {}, said(Array.isArray(value) ? `#${name}` : name)), h("dd", {}, told(one)))));
}
