// All machines, and one of them.

import { bytes, clock, h, jobLink, keep, nodeLink, now, number, redraw, span } from "./dom.js";
import { Grid } from "./grid.js";
import { eventTable } from "./history.js";
import { jobColumns, withHeld } from "./jobs.js";

const stateOf = (node) => (node.gone ? "gone" : node.alive ? node.standing || "ready" : "silent");
const devicesUsed = (node) => Object.keys(node.granted).length;

const columns = [
  { name: "name", title: "machine", width: "minmax(110px, 1.4fr)", value: (node) => node.name, cell: (node) => nodeLink(node.name) },
  { name: "state", title: "state", width: "100px", value: stateOf, cell: (node) => h("span", { class: stateOf(node) }, stateOf(node)) },
  { name: "cpu", title: "CPUs used", width: "100px", value: (node) => node.cpu - node.cpu_free, cell: (node) => `${number((node.cpu - node.cpu_free) / 1000)} of ${number(node.cpu / 1000)}` },
  { name: "memory", title: "memory used", width: "160px", wide: true, value: (node) => node.memory - node.memory_free, cell: (node) => `${bytes(node.memory - node.memory_free)} of ${bytes(node.memory)}` },
  { name: "devices", title: "devices", width: "90px", value: devicesUsed, cell: (node) => (node.devices.length ? `${devicesUsed(node)} of ${node.devices.length}` : "") },
  { name: "attempts", title: "attempts", width: "80px", wide: true, value: (node) => node.attempts, cell: (node) => String(node.attempts) },
  { name: "zone", title: "zone", width: "minmax(60px, 1fr)", wide: true, value: (node) => node.attributes.zone ?? "", cell: (node) => node.attributes.zone ?? "" },
  { name: "reason", title: "reason", width: "minmax(80px, 2fr)", wide: true, value: (node) => node.reason, cell: (node) => h("span", { title: node.reason }, node.reason) },
];

// A machine that is gone, as a row of the list.
const goneRow = (record) => ({
  gone: true, name: record.node, reason: `${record.reason} (gone since ${clock(record.gone_at)})`, cpu: record.cpu_milli, cpu_free: record.cpu_milli,
  memory: record.memory_bytes, memory_free: record.memory_bytes, devices: Array(record.devices).fill(""), granted: {}, attempts: 0, attributes: record.attributes, host: "",
});

export const machines = {
  tables: ["nodes", "gone"],
  make({ live, query }) {
    const chosen = { text: query.get("q") ?? "", state: query.get("state") ?? "" };
    const grid = new Grid({
      columns, sort: "name",
      match: (node) => (chosen.state ? stateOf(node) === chosen.state : !node.gone) &&
        (!chosen.text || `${node.name} ${node.host} ${Object.values(node.attributes).join(" ")} ${node.reason}`.toLowerCase().includes(chosen.text.toLowerCase())),
    });
    const counts = h("span", { class: "dim", id: "counts" });
    const choose = (name, address) => (event) => { chosen[name] = event.target.value; keep(address, chosen[name]); draw(); };
    const state = h("select", { "aria-label": "state", onchange: choose("state", "state") });
    const element = h("div", {}, h("div", { class: "tools" },
      h("input", { type: "search", placeholder: "name, zone, attribute, reason…", "aria-label": "filter", value: chosen.text, oninput: choose("text", "q") }), state, counts), grid.element);
    const names = ["ready", "cordoned", "draining", "drained", "leaving", "quarantined", "silent", "gone"];
    state.append(h("option", { value: "" }, "all states"), ...names.map((each) => h("option", { value: each, selected: each === chosen.state }, each)));
    function draw() {
      const rows = [...live.rows("nodes").values()];
      // Of those that have come back under their names the list has the present ones.
      const gone = [...live.rows("gone").values()].filter((record) => !live.rows("nodes").has(record.node)).map(goneRow);
      grid.set([...rows, ...gone]);
      counts.textContent = live.errors.get("nodes") || (live.has("nodes") ? `${grid.found.length} of ${rows.length} machines${gone.length ? `, ${gone.length} gone` : ""}` : "loading…");
    }
    draw();
    return { element, update: draw, close: () => grid.resize.disconnect() };
  },
};

export const machine = {
  tables: ["nodes", "jobs", "held", "progress"],
  make({ live, ask, id }) {
    const top = h("div");
    const said = h("p", { role: "alert", class: "failed" });
    const devices = h("div");
    const details = h("dl");
    const past = h("div", {}, h("p", { class: "dim" }, "loading…"));
    let age = 0;
    async function askPast() {
      age = 0;
      try { drawPast(await live.get(`/api/nodes/${encodeURIComponent(id)}`)); } catch (error) { redraw(past, h("p", { class: "failed" }, error.message)); }
    }
    function drawPast({ gone, attempts, events }) {
      const ran = [...attempts].reverse();
      const former = [...gone].reverse();
      redraw(past,
        former.length ? [h("h2", {}, "Former processes of fray-node"), h("table", {}, h("tr", {}, ["gone since", "was there", "kind", "reason"].map((name) => h("th", {}, name))),
          former.map((each) => h("tr", {}, [clock(each.gone_at), each.joined_at ? span(each.gone_at - each.joined_at) : "", each.devices ? `${each.devices} × ${each.kind}` : each.kind, each.reason].map((value) => h("td", {}, value)))))] : [],
        h("h2", {}, "Ran here, in the last 7 days"), ran.length ? h("table", { id: "ran" }, h("tr", {}, ["job", "user", "placed", "time", "end"].map((name) => h("th", {}, name))),
          ran.map((each) => h("tr", {}, [jobLink(each.job_id, each.name), each.user, clock(each.placed_at), span((each.ended_at ?? now()) - each.placed_at), each.cause || "running"].map((value) => h("td", {}, value))))) : h("p", { class: "dim" }, "nothing"),
        h("h2", {}, "Events, of the last 7 days"), h("div", { id: "events" }, eventTable([...events].reverse())));
    }
    askPast();
    const grid = new Grid({ columns: jobColumns, sort: "-launched", whole: false, match: (job) => job.nodes.includes(id) });
    const act = async (action, question, withReason) => {
      const reason = await ask(question, action, withReason);
      if (reason === null) return;
      try {
        said.textContent = "";
        const found = await live.act(`/api/nodes/${encodeURIComponent(id)}/${action}`, { reason });
        said.textContent = found.notes.join(" ");
      } catch (error) { said.textContent = error.message; }
    };
    const button = (action, question, withReason = true) => h("button", { type: "button", id: action, onclick: () => act(action, question, withReason) }, action);
    const buttons = [
      button("cordon", `Place nothing new on ${id}?`), button("drain", `Place nothing new on ${id}, and move what runs there once it may end?`),
      button("uncordon", `Use ${id} again?`, false),
    ];
    const element = h("div", {}, top, h("div", { class: "tools" }, buttons), said, h("h2", {}, "Devices"), devices, h("h2", {}, "Jobs that run or ran last here"), grid.element, past, h("h2", {}, "Details"), details);
    function draw() {
      const node = live.rows("nodes").get(id);
      const may = live.status?.may.cordon;
      for (const each of buttons) { each.disabled = !may || !node; each.title = may ? "" : `role ${live.status?.role} may not`; }
      if (!node) {
        redraw(top, h("h1", {}, id), h("p", { class: "headline" }, live.has("nodes") ? "The cluster has no machine of this name now." : "loading…"));
        return;
      }
      const state = stateOf(node);
      redraw(top, h("h1", {}, node.name, " ", h("span", { class: state }, state)), h("p", { class: "headline" },
        node.reason || `${number((node.cpu - node.cpu_free) / 1000)} of ${number(node.cpu / 1000)} CPUs and ${bytes(node.memory - node.memory_free)} of ${bytes(node.memory)} are used by ${node.attempts} attempts`));
      const holder = (device) => node.busy[device] ? `withheld: ${node.busy[device]}` : node.granted[device]
        ? jobLink(node.granted[device].split(":")[0], node.granted[device]) : "free";
      redraw(devices, node.devices.length ? h("table", {}, node.devices.map((device) => h("tr", {}, h("td", { class: "mono" }, device), h("td", {}, holder(device))))) : h("p", { class: "dim" }, "none"));
      redraw(details, [["host", node.host], ...Object.entries(node.attributes)].map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat());
      grid.set(withHeld(live));
    }
    draw();
    return { element, update: draw, tick: () => { age += 1; if (age >= 30 && !document.hidden) askPast(); }, close: () => grid.resize.disconnect() };
  },
};
