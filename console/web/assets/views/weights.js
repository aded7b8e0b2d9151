// Publications of weights: how large, how old, where they lie, and who has which.

import { h, said } from "../dom.js";
import { any, bytes, duration } from "../words.js";
import { pages } from "../pages.js";

const NAMES = 3;

export function weights({ run }) {
  const list = pages({
    run, noun: "weights", name: "Publications", sort: "-version",
    columns: [
      ["Publication", (one) => one.id], ["Model", (one) => one.model], ["Version", (one) => any(one.version), "number"],
      ["Step", (one) => any(one.step), "number"], ["Published", (one) => `${duration(one.age_s)} ago`, "number"],
      ["Size", (one) => bytes(one.num_bytes), "number"], ["Way", (one) => one.transport || "folder"],
      ["Workers that have it", (one) => holders(one.workers)], ["Loading it", (one) => holders(one.loading)],
      ["Kept for", (one) => holders(one.pinned_by)], ["State", (one) => said(one.state, 200)],
      ["Folder", (one) => (one.path ? said(`${one.path} (${one.folder})`) : "")],
    ],
  });
  return {
    node: h("section", {}, h("h1", {}, "Weights"), list.node),
    update: list.update,
    close() {},
  };
}

function holders(names) {
  if (!names?.length) return "";
  const rest = names.length - NAMES;
  return said(`${names.length}: ${names.slice(0, NAMES).join(", ")}${rest > 0 ? ` and ${rest} more` : ""}`);
}
