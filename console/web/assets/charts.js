// Charts of a run, with those of another run as an overlay.

import { chart } from "./chart.js";
import { get, ofRun } from "./net.js";

export async function read(run, other) {
  const [mine, theirs] = await Promise.all([run, other].map((one) => (one ? get(ofRun(one, "curves")) : { charts: [] })));
  const found = new Map(mine.charts.map((one) => [one.id, { ...one, both: [[run, one.lines]] }]));
  for (const one of theirs.charts) {
    const beside = found.get(one.id) ?? { ...one, both: [] };
    found.set(one.id, { ...beside, both: [...beside.both, [other, one.lines]] });
  }
  return [...found.values()];
}

// by: "step" or "up_s". Returns the nodes, and a function that ends their observers.
export function drawn(found, run, other, by, smooth = true) {
  const along = (one) => (one.rows === "queue" ? "up_s" : by);
  const made = found.map((one) => chart({
    ...one,
    smooth,
    // The queue is sampled every second, and a step may take many seconds.
    xName: along(one) === "step" ? "step" : "second",
    lines: one.both.flatMap(([owner, lines]) => lines.map((line, colour) => ({
      name: other ? `${line.name}, ${owner}` : line.name,
      colour,
      dashed: owner !== run,
      x: line[along(one)],
      y: line.value,
    }))),
  }));
  return { nodes: made.map((one) => one.node), close: () => made.forEach((one) => one.close()) };
}
