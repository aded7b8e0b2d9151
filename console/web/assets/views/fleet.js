// The fleet: every worker with its version, its load, its GPUs, the age of its heartbeat, and what blocks it; and, where
// `penstock fleet` runs, its groups and processes, and what its autoscaler decided and why.

import { h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, duration, number } from "../words.js";
import { pages } from "../pages.js";
import { table } from "../table.js";

const EVERY_MS = 3000;

export function fleet({ run }) {
  const facts = h("p", { class: "count" }), planned = h("div", {});
  const workers = pages({
    run, noun: "workers", name: "Workers", sort: "name",
    filters: [{ name: "Name", field: "name" }, { name: "State", field: "state" }, { name: "Host", field: "host" }],
  });
  let asked = 0;

  function look() {
    asked = Date.now();
    get(ofRun(run, "fleet")).then(({ fleet: found }) => replace(planned, found && plannedOf(found)), () => replace(planned));
  }

  return {
    node: h("section", {}, h("h1", {}, "Fleet"), facts, planned, workers.node),
    update(seen) {
      const part = seen.parts.find((one) => one.id === "workers");
      replace(facts, part && part.facts.map(([name, value]) => `${name} ${any(value)}`).join(" · "));
      workers.update(seen);
      if (!seen.live) replace(planned);
      else if (Date.now() - asked >= EVERY_MS && !planned.contains(document.activeElement)) look();
    },
    close() {},
  };
}

const BINDS = {
  backlog: "what is left to generate fills no more", demand: "the trainers need no more", fresh: "more would generate stale samples",
  min: "fewer are not allowed", max: "more are not allowed",
};

function plannedOf({ groups, processes, autoscale, decisions, endpoints, host }) {
  const odd = processes.filter((one) => one.state !== "running" || one.why);
  return [
    h("h2", {}, "Groups"), table("Groups", [
      ["Group", (one) => one.group], ["Engines of it", (one) => one.worker_type], ["Engines", (one) => number(one.engines), "number"],
      ["Leaving", (one) => number(one.leaving), "number"], ["Why not as wanted", (one) => said(one.refused ?? "", 300)],
    ], groups),
    h("p", { class: "count" }, said(`run by ${host}; ${Object.entries(endpoints).map(([model, url]) => `${model} answers at ${url}`).join(", ")}`, 600)),
    autoscale.group ? scaled(autoscale, decisions) : null,
    odd.length ? [h("h2", {}, "Processes that do not run"), table("Processes", [
      ["Process", (one) => one.name], ["Kind", (one) => one.kind], ["Host", (one) => one.host], ["State", (one) => one.state],
      ["Starts", (one) => number(one.starts), "number"], ["Why", (one) => said(one.why, 300)],
    ], odd)] : null,
    h("h2", {}, "Workers"),
  ];
}

function scaled({ group, wanted, engines, binds, terms, capacity_tokens_per_s: each }, decisions) {
  const now = `${group}: ${number(engines)} engines, ${number(wanted)} wanted, for ${BINDS[binds] ?? binds} (${binds})` +
    `; ${termsOf(terms)}${each ? `; a worker with full slots generates ${number(each)} tokens/s` : ""}`;
  return [h("h2", {}, "Autoscaler"), h("p", {}, said(now, 600)), decisions.length ? table("Decisions", [
    ["When", (one) => `${duration(Date.now() / 1000 - one.at)} ago`], ["Engines", (one) => `${number(one.before)} → ${number(one.engines)}`],
    ["Wanted", (one) => number(one.wanted), "number"], ["Because", (one) => said(`${BINDS[one.binds] ?? one.binds} (${one.binds})`, 200)],
    ["What each allows", (one) => said(termsOf(one.terms), 200)],
  ], decisions) : h("p", { class: "none" }, "It has not changed their number.")];
}

const termsOf = (terms) => Object.entries(terms ?? {}).map(([name, count]) => `${name} ${any(count)}`).join(", ");
