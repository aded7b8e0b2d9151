// What the run was set to; beside another run, what that one has otherwise.

import { failure, h, loading, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { table } from "../table.js";

export function settings({ run, other }) {
  const list = h("div", {}, loading());
  const wanted = h("input", { type: "search", oninput: () => draw() });
  const title = h("h1", {}, other ? "Where the configurations differ" : "Configuration");
  let rows = [];

  function draw() {
    const part = wanted.value.toLowerCase();
    const kept = rows.filter((row) => row.join(" ").toLowerCase().includes(part));
    const columns = [["Key", ([key]) => key], [other ? run : "Value", (row) => told(row[1])]];
    if (other) columns.push([other, (row) => told(row[2])]);
    replace(list, kept.length ? table("Configuration", columns, kept) : h("p", { class: "none" }, none()));
  }

  const none = () => (rows.length ? "No key matches." : other ? "They are set alike." : "The run left no config.yaml.");
  const load = async () => {
    try {
      const found = await get(ofRun(run, "settings"), { other });
      rows = found.settings ?? found.differences;
      draw();
    } catch (error) {
      replace(list, failure(error));
    }
  };

  load();
  return { node: h("section", {}, title, h("div", { class: "filters" }, h("label", { class: "picker" }, h("span", {}, "Find"), wanted)), list), close() {} };
}

function told(value) {
  if (value === null || value === undefined) return h("span", { class: "null" }, "not set");
  return typeof value === "object" ? h("span", { class: "null" }, "empty") : said(String(value));
}
