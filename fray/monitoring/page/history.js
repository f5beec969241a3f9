// The past: what was held and what it cost, and the events of the cluster.

import { clock, h, jobLink, keep, nodeLink, redraw } from "./dom.js";
import { Grid } from "./grid.js";

const DAY_S = 86400;
export const SPANS = [["3600", "the last hour"], [String(DAY_S), "the last day"], [String(7 * DAY_S), "the last 7 days"], [String(30 * DAY_S), "the last 30 days"]];
const KEYS = ["user", "namespace", "machine", "node", "job", "cause"];
const AGAIN_S = 30;

export const hours = (value) => (value ? (value >= 1 ? value.toFixed(2) : value.toPrecision(2)) : "0");
export const money = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }));
const percent = (part, whole) => (part && whole ? `${Math.round((100 * part) / whole)}%` : "");
const chipsOf = (part) => Object.values(part.chips).reduce((sum, value) => sum + value, 0);
// Of chip-hours; of CPU-hours where there are none.
const share = (part, whole) => (chipsOf(whole) ? percent(chipsOf(part), chipsOf(whole)) : percent(part.cpu, whole.cpu));

// A view whose answer is asked for again when a choice in the address changes, and from time to time.
export function asked({ live, query, path, fields, show }) {
  const chosen = Object.fromEntries(fields.map(({ name, initial }) => [name, query.get(name) ?? initial ?? ""]));
  const said = h("p", { role: "alert", class: "failed" });
  let count = 0;
  let age = 0;
  async function ask() {
    const number = (count += 1);
    age = 0;
    try {
      const found = await live.get(`${path}?${new URLSearchParams(chosen)}`);
      if (number !== count) return; // a later choice
      said.textContent = "";
      show(found, chosen);
    } catch (error) { if (number === count) said.textContent = error.message; }
  }
  let timer;
  const change = (name) => (event) => {
    chosen[name] = event.target.value;
    keep(name, chosen[name]);
    clearTimeout(timer);
    timer = setTimeout(ask, event.type === "input" ? 300 : 0);
  };
  const tools = h("div", { class: "tools" }, fields.map(({ name, label, options }) => (options
    ? h("select", { "aria-label": label, onchange: change(name) }, options.map(([value, text]) => h("option", { value, selected: value === chosen[name] }, text)))
    : h("input", { type: "search", placeholder: label, "aria-label": label, value: chosen[name], oninput: change(name) }))));
  ask();
  return { said, tools, tick: () => { age += 1; if (age >= AGAIN_S && !document.hidden) ask(); } };
}

export const history = {
  tables: [],
  make({ live, query }) {
    let by = "user";
    const key = (row) => (by === "job" ? jobLink(row.key, row.name || row.key) : by === "node" ? nodeLink(row.key) : row.key || "(none)");
    const column = (name, title, value, text = value, wide = false) => ({ name, title, width: "minmax(70px, 1fr)", wide, value, cell: (row) => String(text(row)) });
    const grid = new Grid({
      sort: "-cpu",
      columns: [
        { name: "key", title: "of", width: "minmax(110px, 2fr)", value: (row) => row.name || row.key, cell: key },
        column("cost", "cost", (row) => row.cost?.total ?? null, (row) => money(row.cost?.total)),
        column("wasted", "wasted", (row) => row.cost?.wasted ?? null, (row) => money(row.cost?.wasted), true),
        column("cpu", "CPU-h", (row) => row.held.cpu, (row) => hours(row.held.cpu)),
        column("memory", "GiB-h", (row) => row.held.memory_gib, (row) => hours(row.held.memory_gib), true),
        column("chips", "chip-h", (row) => chipsOf(row.held), (row) => hours(chipsOf(row.held))),
        column("jobs", "jobs", (row) => row.jobs, undefined, true),
        column("attempts", "attempts", (row) => row.attempts, undefined, true),
        column("retried", "retried", (row) => row.retried.cpu, (row) => share(row.retried, row.held), true),
        column("preempted", "preempted", (row) => row.preempted.cpu, (row) => share(row.preempted, row.held), true),
        column("idle", "idle", (row) => (row.cpu_known ? row.cpu_idle / row.cpu_known : null), (row) => (row.cpu_known ? `${Math.round((100 * row.cpu_idle) / row.cpu_known)}%` : ""), true),
        column("wait", "wait h", (row) => row.wait_h, (row) => hours(row.wait_h), true),
      ],
    });
    const total = h("p", { class: "dim", id: "total" }, "loading…");
    const asking = asked({
      live, query, path: "/api/held",
      fields: [
        { name: "by", label: "sums by", initial: "user", options: KEYS.map((name) => [name, `by ${name === "machine" ? "kind of machine" : name}`]) },
        { name: "since_s", label: "time", initial: String(7 * DAY_S), options: SPANS },
        { name: "user", label: "user" }, { name: "namespace", label: "namespace" }, { name: "job", label: "job" }, { name: "node", label: "machine" },
      ],
      show({ held, costs }, chosen) {
        by = chosen.by;
        grid.set(held.map((sum, index) => ({ ...sum, cost: costs[index] })));
        const all = costs.reduce((sum, each) => sum + each.total, 0);
        const unpriced = [...new Set(costs.flatMap((each) => each.unpriced))].sort();
        total.textContent = !held.length ? "nothing ran in that time" : costs.length
          ? `in all ${money(all)}${unpriced.length ? `; without a price in the policy: ${unpriced.join(", ")}` : ""}` : "the policy has no prices, so there are no costs";
      },
    });
    return { element: h("div", {}, asking.tools, asking.said, total, grid.element), update() {}, tick: asking.tick, close: () => grid.resize.disconnect() };
  },
};

export function eventTable(found) {
  if (!found.length) return h("p", { class: "dim" }, "none");
  return h("table", {}, found.map((each) => h("tr", {}, h("td", { class: "mono" }, clock(each.time)), h("td", {}, each.job ? jobLink(each.job) : ""), h("td", {}, each.what), h("td", {}, each.text))));
}

export const events = {
  tables: [],
  make({ live, query }) {
    const list = h("div", {}, "loading…");
    const asking = asked({
      live, query, path: "/api/events",
      fields: [{ name: "since_s", label: "time", initial: String(DAY_S), options: SPANS }, { name: "user", label: "user" }, { name: "node", label: "machine" }],
      show({ events: found }) { redraw(list, eventTable([...found].reverse())); },
    });
    return { element: h("div", {}, asking.tools, asking.said, list), update() {}, tick: asking.tick };
  },
};
