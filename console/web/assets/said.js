// The answers with the best and the worst rewards in the last trained batch.

import { h, said } from "./dom.js";
import { get, ofRun } from "./net.js";
import { number } from "./words.js";
import { chip, inLine, shadesOf } from "./answers.js";
import { address } from "./place.js";

export async function newest(run) {
  const found = await get(ofRun(run, "newest"));
  const head = h("div", { class: "headed" }, h("h2", {}, "Recent answers"));
  if (found.batch === null) {
    return [head, h("p", { class: "none" }, said(found.problems[0] ?? (found.there ? "No batch was trained yet." : "This run keeps no history of its samples."), 300))];
  }
  head.append(h("a", { href: address({ run, view: "samples", asked: { batch: found.batch, by: "group" } }) }, `all of batch ${number(found.batch)}`));
  const shade = shadesOf([...found.best, ...found.worst].map((one) => one.reward));
  const ends = found.worst.length ? [["Best rewarded", found.best], ["Worst rewarded", found.worst]] : [["All rewarded alike", found.best]];
  return [head, h("div", { class: "halves" }, ends.map(([name, rows]) => h("div", {}, h("h3", {}, name),
    h("ul", { class: "answers" }, rows.map((one) => line(run, one, shade))))))];
}

function line(run, one, shade) {
  return h("li", {}, chip(one.reward, shade), h("a", { href: address({ run, view: "samples", asked: { id: one.id, job: one.job } }) },
    inLine(one.prompt || one.id, 110), h("span", { class: "arrow", "aria-hidden": "true" }, " → "), h("b", {}, inLine(one.answer || "(nothing)", 160))));
}
