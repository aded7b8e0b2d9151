// The fleet: every worker with its version, its load, how long ago it was heard of, and what keeps it.

import { h, said, replace } from "../dom.js";
import { any, duration, number } from "../words.js";
import { pages } from "../pages.js";

export function fleet({ run }) {
  const facts = h("p", { class: "count" });
  const workers = pages({
    run, noun: "workers", name: "Workers", sort: "name",
    filters: [{ name: "Name", field: "name" }, { name: "State", field: "state" }, { name: "Host", field: "host" }],
    columns: [
      ["Worker", (one) => one.name],
      ["State", (one) => h("span", { class: `badge is-${one.state === "serving" ? "well" : "waits"}` }, said(one.state || "unknown"))],
      ["Version", (one) => any(one.version), "number"],
      ["Jobs held", (one) => number(one.held), "number"],
      ["Samples", (one) => load(one), "number"],
      ["Tokens/s", (one) => number(one.tokens_per_s), "number"],
      ["Heard of", (one) => `${duration(one.age_s)} ago`, "number"],
      ["Restarts", (one) => number(one.engine_restarts), "number"],
      ["Lost leases", (one) => number(one.lost_leases), "number"],
      ["Host", (one) => one.host], ["Engine", (one) => one.engine],
      ["Why", (one) => said(one.why, 200)],
    ],
  });
  return {
    node: h("section", {}, h("h1", {}, "Fleet"), facts, workers.node),
    update(seen) {
      const part = seen.parts.find((one) => one.id === "workers");
      replace(facts, part && part.facts.map(([name, value]) => `${name} ${any(value)}`).join(" · "));
      workers.update(seen);
    },
    close() {},
  };
}

function load({ running, slots }) {
  const meter = h("meter", { min: 0, max: Math.max(1, slots), value: Math.min(running, slots), "aria-label": "slots in use" });
  return h("span", { class: "load" }, meter, `${number(running)} of ${number(slots)}`);
}
