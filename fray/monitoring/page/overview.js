// The whole cluster: capacity, over time, queue, shares, what failed last.

import { capacityOverTime } from "./capacity.js";
import { ago, amount, h, jobLink, now, redraw, span, svg } from "./dom.js";

const ZONES = 8;
const nothing = () => ({ whole: 0, used: 0, out: 0, reserved: 0 });

// Amounts of each resource over all machines, and in each zone: whole, used, out of service and not used, reserved.
function capacities(nodes, reservations) {
  const found = new Map();
  const sums = (kind, node) => {
    if (!found.has(kind)) found.set(kind, { ...nothing(), zones: new Map() });
    const { zones } = found.get(kind);
    const zone = node.attributes.zone ?? "";
    if (!zones.has(zone)) zones.set(zone, nothing());
    return [found.get(kind), zones.get(zone)];
  };
  const add = (node, kind, whole, used, isOut) => {
    for (const sum of sums(kind, node)) {
      sum.whole += whole;
      sum.used += used;
      if (isOut) sum.out += whole - used;
    }
  };
  const byName = new Map(nodes.map((node) => [node.name, node]));
  for (const node of nodes) {
    const isOut = !node.alive || node.standing !== "";
    add(node, "cpu", node.cpu / 1000, (node.cpu - node.cpu_free) / 1000, isOut);
    add(node, "memory", node.memory, node.memory - node.memory_free, isOut);
    for (const device of node.devices) {
      const kind = device.split("-")[0];
      add(node, kind, 1, device in node.granted ? 1 : 0, isOut || device in node.busy);
    }
  }
  // Devices that a reservation holds and no job in it uses.
  for (const info of reservations) for (const unit of info.units) for (const device of unit.devices) {
    const holder = unit.nodes.map((name) => byName.get(name)).find((node) => node && node.devices.includes(device) && !(device in node.granted));
    if (holder) for (const sum of sums(device.split("-")[0], holder)) sum.reserved += 1;
  }
  return found;
}

function bar(parts) {
  return h("div", { class: "bar" }, parts.map(([name, part]) => h("i", { class: name, "width%": 100 * part, title: `${name}: ${Math.round(100 * part)}%` })));
}

function capacityBar({ whole, used, out, reserved }) {
  const part = (value) => (whole ? value / whole : 0);
  return bar([["used", part(used)], ["reserved", part(reserved)], ["out", part(out)]]);
}

function capacityCard(kind, { zones, ...sum }) {
  const { whole, used, out, reserved } = sum;
  const idle = Math.max(0, whole - used - out - reserved);
  const text = (value) => amount(kind, value);
  return h("div", { class: "card", "data-kind": kind },
    h("h2", {}, kind), h("div", {}, `${text(used)} of ${text(whole)} used`),
    capacityBar(sum),
    h("div", { class: "keys dim" }, [["used", used], ["reserved", reserved], ["out", out], ["idle", idle]].map(([name, value]) =>
      h("span", {}, h("i", { class: `key ${name}` }), `${name === "out" ? "out of service" : name} ${text(value)}`))),
    zones.size > 1 ? h("table", { class: "zones" }, [...zones].sort().slice(0, ZONES).map(([zone, part]) => h("tr", {},
      h("td", {}, zone || "no zone"), h("td", {}, `${text(part.used)} of ${text(part.whole)}`), h("td", {}, capacityBar(part))))) : null,
    zones.size > ZONES ? h("div", { class: "dim" }, `and ${zones.size - ZONES} more zones`) : null);
}

function chart(samples) {
  const lines = ["cpu", "memory", "gpu", "tpu"].filter((kind) => samples.some((sample) => kind in sample.utilisation));
  const begin = samples[0].at;
  const length = Math.max(1, samples[samples.length - 1].at - begin);
  const points = (kind) => samples.map((sample) => `${(100 * (sample.at - begin)) / length},${100 - 100 * (sample.utilisation[kind] ?? 0)}`).join(" ");
  const drawn = svg("svg", { class: "chart", viewBox: "0 -2 100 104", preserveAspectRatio: "none", role: "img", "aria-label": "utilisation over time" },
    ...lines.map((kind, index) => svg("polyline", { class: `c${index}`, points: points(kind) })));
  return h("div", { class: "card" }, h("h2", {}, `Use, in ${span(now() - begin)}`), drawn,
    h("div", { class: "keys dim" }, lines.map((kind, index) => h("span", {}, h("i", { class: `key b${index}` }), `${kind} ${Math.round(100 * (samples[samples.length - 1].utilisation[kind] ?? 0))}%`))));
}

const used = (values) => Object.entries(values).map(([kind, value]) => `${amount(kind, value)} ${kind}`).join(", ");

export const overview = {
  tables: ["jobs", "nodes", "usage", "queue", "reservations", "samples"],
  make(page) {
    const { live } = page;
    const overTime = capacityOverTime(page);
    const capacity = h("div", { class: "cards", id: "capacity" });
    const counts = h("div", { class: "cards" });
    const queue = h("div");
    const shares = h("div");
    const failed = h("div");
    const element = h("div", {}, capacity, counts, overTime.element, h("h2", {}, "Queue"), queue, h("h2", {}, "Shares"), shares, h("h2", {}, "Failed last"), failed);

    function drawCounts() {
      const states = {};
      for (const job of live.rows("jobs").values()) states[job.state] = (states[job.state] ?? 0) + 1;
      const machines = {};
      for (const node of live.rows("nodes").values()) {
        const state = node.alive ? node.standing || "ready" : "silent";
        machines[state] = (machines[state] ?? 0) + 1;
      }
      const list = (found, view, key) => h("div", { class: "keys" }, Object.entries(found).sort().map(([state, count]) =>
        h("span", {}, h("a", { href: `#/${view}?${key}=${state}`, class: state }, `${count} ${state}`))));
      const samples = live.document("samples") ?? [];
      redraw(counts,
        h("div", { class: "card" }, h("h2", {}, "Jobs"), live.has("jobs") ? list(states, "jobs", "state") : "loading…"),
        h("div", { class: "card" }, h("h2", {}, "Machines"), live.has("nodes") ? list(machines, "machines", "state") : "loading…"),
        samples.length > 1 ? chart(samples) : null);
    }

    function drawFailed() {
      const found = [...live.rows("jobs").values()].filter((job) => job.state === "failed").sort((a, b) => b.ended - a.ended).slice(0, 8);
      redraw(failed, found.length ? h("table", {}, found.map((job) => h("tr", {}, h("td", {}, jobLink(job.id, job.name)), h("td", {}, ago(job.ended)), h("td", {}, job.text)))) : h("p", { class: "dim" }, "none"));
    }

    function drawQueue() {
      const found = live.document("queue");
      if (!found) return;
      const rows = found.entries.slice(0, 20).map((entry) => h("tr", {},
        h("td", {}, entry.position), h("td", {}, entry.kind === "job" ? jobLink(entry.id) : entry.id), h("td", {}, entry.user),
        h("td", { class: "wide word" }, entry.band), h("td", { class: "wide word" }, entry.standing), h("td", {}, entry.request), h("td", {}, span(now() - entry.since)), h("td", { class: "wide" }, entry.reason)));
      redraw(queue, found.total ? h("table", {},
        h("tr", {}, h("th", {}, "#"), h("th", {}, "job"), h("th", {}, "user"), h("th", { class: "wide" }, "band"), h("th", { class: "wide" }, "quota"), h("th", {}, "request"), h("th", {}, "waits"), h("th", { class: "wide" }, "reason")), rows) : h("p", { class: "dim" }, "nothing waits"),
      found.total > rows.length ? h("p", { class: "dim" }, `and ${found.total - rows.length} more`) : null);
    }

    function drawShares() {
      const found = live.document("usage");
      if (!found) return;
      const users = [...found.users].sort((a, b) => b.share - a.share).slice(0, 50);
      redraw(shares, users.length ? h("table", {},
        h("tr", {}, h("th", {}, "user"), h("th", {}, "share"), h("th", { class: "wide" }, "over time"), h("th", { class: "wide" }, "weight"), h("th", {}, "uses"), h("th", {}, "waiting")),
        users.map((user) => h("tr", {}, h("td", {}, user.user || "–"), h("td", {}, `${(100 * user.share).toFixed(1)}%`), h("td", { class: "wide" }, `${(100 * user.mean).toFixed(1)}%`), h("td", { class: "wide" }, user.weight), h("td", {}, used(user.used)), h("td", {}, user.waiting)))) : h("p", { class: "dim" }, "no one uses it"));
    }

    function drawCapacity() {
      if (!live.has("nodes")) return;
      const found = capacities([...live.rows("nodes").values()], [...live.rows("reservations").values()]);
      redraw(capacity, [...found].map(([kind, sum]) => capacityCard(kind, sum)));
    }

    function update(table) {
      if (table === "jobs") { drawCounts(); drawFailed(); }
      if (table === "nodes" || table === "reservations") { drawCapacity(); drawCounts(); }
      if (table === "queue") drawQueue();
      if (table === "usage") drawShares();
      if (table === "samples") drawCounts();
    }
    drawCounts();
    return { element, update, tick: overTime.tick };
  },
};
