// All jobs, as a tree or flat.

import { ago, clock, h, jobLink, keep, nodeLink, now, span } from "./dom.js";
import { Grid } from "./grid.js";
import { hours, money } from "./history.js";

export const lasted = (job) => {
  if (job.state === "pending") return job.launched ? now() - job.launched : null;
  return job.started ? (job.ended ?? now()) - job.started : null;
};
export const stateText = (job) =>
  job.cause && ![job.state, "failure"].includes(job.cause) ? `${job.state} (${job.cause})` : job.health || job.state;
export const sign = (job) => job.seen ?? job.ended ?? job.started ?? job.launched;

// The cost where the policy has prices, else hours of chips or CPUs.
export function heldText(held) {
  if (!held) return "";
  if (held.cost !== null) return money(held.cost);
  return held.chip_h ? `${hours(held.chip_h)} chip-h` : `${hours(held.cpu_h)} CPU-h`;
}

export const jobColumns = [
  {
    name: "name", title: "job", width: "minmax(130px, 3fr)", value: (job) => job.name,
    cell: (job, depth) => h("span", {}, "\u2003".repeat(depth), depth ? "└ " : "", jobLink(job.id, job.name)),
  },
  {
    name: "state", title: "state", width: "minmax(76px, 110px)", value: (job) => job.state,
    cell: (job) => h("span", { class: job.health ? "warn" : job.state }, stateText(job)),
  },
  { name: "time", title: "time", width: "60px", value: lasted, cell: (job) => span(lasted(job)) },
  { name: "progress", title: "progress", width: "minmax(90px, 1fr)", wide: true, value: (job) => job.progress, cell: (job) => job.progress },
  { name: "seen", title: "last sign", width: "90px", wide: true, value: sign, cell: (job) => ago(sign(job)) },
  { name: "node", title: "machine", width: "minmax(70px, 1fr)", wide: true, value: (job) => job.nodes[0] ?? "", cell: (job) => h("span", {}, job.nodes.slice(0, 3).map((name, i) => [i ? ", " : "", nodeLink(name)]).flat(), job.nodes.length > 3 ? ` +${job.nodes.length - 3}` : "") },
  { name: "user", title: "user", width: "80px", wide: true, value: (job) => job.user, cell: (job) => job.user },
  { name: "namespace", title: "namespace", width: "90px", wide: true, value: (job) => job.namespace, cell: (job) => job.namespace },
  { name: "held", title: "held", width: "80px", wide: true, value: (job) => (job.held ? job.held.cost ?? job.held.cpu_h : null), cell: (job) => heldText(job.held) },
  { name: "launched", title: "launched", width: "90px", wide: true, value: (job) => job.launched, cell: (job) => clock(job.launched) },
  { name: "text", title: "reason", width: "minmax(60px, 3fr)", value: (job) => job.text, cell: (job) => h("span", { title: job.text }, job.text) },
];

// Sorted rows as a tree: children below their parents; a job whose parent is not among them has depth 0.
export function tree(sorted) {
  const ids = new Set(sorted.map((job) => job.id));
  const below = new Map();
  const roots = [];
  for (const job of sorted) {
    if (ids.has(job.parent) && job.parent !== job.id) {
      if (below.has(job.parent)) below.get(job.parent).push(job);
      else below.set(job.parent, [job]);
    } else roots.push(job);
  }
  const found = [];
  const waiting = roots.reverse().map((row) => ({ row, depth: 0 }));
  while (waiting.length) {
    const next = waiting.pop();
    found.push(next);
    for (const row of [...(below.get(next.row.id) ?? [])].reverse()) waiting.push({ row, depth: next.depth + 1 });
  }
  return found;
}

// The jobs, each with what it held.
export function withHeld(live) {
  const held = live.rows("held");
  const rows = [...live.rows("jobs").values()];
  for (const job of rows) job.held = held.get(job.id) ?? null;
  return rows;
}

const STATES = ["pending", "running", "failed", "stopped", "succeeded"];

export const jobs = {
  tables: ["jobs", "held", "progress"],
  make({ live, query }) {
    const chosen = { text: query.get("q") ?? "", state: query.get("state") ?? "", flat: query.get("flat") ?? "" };
    const grid = new Grid({
      columns: jobColumns, sort: "-launched",
      match: (job) => {
        if (chosen.state && job.state !== chosen.state) return false;
        if (!chosen.text) return true;
        return `${job.id} ${job.user} ${job.namespace} ${job.nodes.join(" ")} ${job.group} ${job.text}`.toLowerCase().includes(chosen.text.toLowerCase());
      },
      order: (sorted) => (chosen.flat ? sorted.map((row) => ({ row, depth: 0 })) : tree(sorted)),
    });
    const counts = h("span", { class: "dim", id: "counts" });
    const choose = (name, address) => (event) => {
      chosen[name] = event.target.type === "checkbox" ? (event.target.checked ? "" : "1") : event.target.value;
      keep(address, chosen[name]);
      draw();
    };
    const state = h("select", { "aria-label": "state", onchange: choose("state", "state") },
      h("option", { value: "" }, "all states"), STATES.map((each) => h("option", { value: each, selected: each === chosen.state }, each)));
    const element = h("div", {},
      h("div", { class: "tools" },
        h("input", { type: "search", placeholder: "name, user, machine, reason…", "aria-label": "filter", value: chosen.text, oninput: choose("text", "q") }),
        state,
        h("label", {}, h("input", { type: "checkbox", checked: !chosen.flat, onchange: choose("flat", "flat") }), " tree"),
        counts),
      grid.element);
    function draw() {
      const rows = withHeld(live);
      grid.set(rows);
      const error = live.errors.get("jobs");
      counts.textContent = error || (live.has("jobs") ? `${grid.found.length} of ${rows.length} jobs` : "loading…");
    }
    draw();
    return { element, update: (table) => table !== "status" && draw(), tick: () => grid.draw(), close: () => grid.resize.disconnect() };
  },
};
