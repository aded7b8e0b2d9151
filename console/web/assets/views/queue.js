// The queue: its lanes, the jobs of each state, and those that were buried.

import { act, allowed, tokenBar } from "../acts.js";
import { failure, h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any } from "../words.js";
import { pages } from "../pages.js";
import { address } from "../place.js";

const STATES = ["queued", "leased", "delayed", "dead", "ready", "retiring"];

export function queue({ run }) {
  const detail = h("section", { class: "detail", hidden: true, "aria-live": "polite" });
  const open = (row) => showJob(run, row.job, detail);
  const jobs = pages({
    run, noun: "jobs", name: "Jobs", onRow: open, sort: "state",
    filters: [{ name: "State", field: "state", values: STATES }, { name: "Job", field: "job" }, { name: "Worker", field: "worker" }],
  });
  const dead = pages({
    run, noun: "dead", name: "Dead letters", onRow: open, sort: "-buried_ms", limit: 10,
    filters: [{ name: "Reason", field: "reason" }, { name: "Job", field: "job" }],
    acts: allowed() ? (one) => deadActs(run, one.job, anew) : null,
  });
  const lanes = pages({ run, noun: "lanes", name: "Lanes", acts: allowed() ? (one) => laneAct(run, one, anew) : null });
  const lists = [lanes, dead, jobs];
  const anew = () => lists.forEach((one) => one.anew());

  return {
    node: h("section", {}, h("h1", {}, "Queue"), tokenBar(), lanes.node,
      detail, h("h2", {}, "Dead letters"), dead.node, h("h2", {}, "Jobs"), jobs.node),
    update: (seen) => lists.forEach((one) => one.update(seen)),
    close() {},
  };
}

function laneAct(run, { lane, paused }, then) {
  return act({
    run, path: "lane", name: paused ? "Resume" : "Pause", wish: { lane, closed: !paused }, then,
    tell: ({ changed }) => `Lane ${lane} ${changed ? (paused ? "is resumed" : "is paused") : "was so already"}.`,
  });
}

function deadActs(run, job, then) {
  const tell = (what) => ({ done }) => (done.length ? `Job ${job} ${what}.` : `Job ${job} is no dead letter any more.`);
  const jobs = [job];
  return h("span", { class: "acts" },
    act({ run, path: "dead", name: "Requeue", wish: { do: "requeue", jobs }, tell: tell("is queued again"), then }),
    act({ run, path: "dead", name: "Purge", wish: { do: "purge", jobs }, tell: tell("is given up"), then,
      ask: `Give job ${job} up for good?` }));
}

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
