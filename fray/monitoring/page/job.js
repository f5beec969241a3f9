// One job: on top why it waits or why it ended, then the chain of causes, attempts, events, details; its log, live.

import { callers, histogram } from "./actors.js";
import { Flame } from "./flame.js";
import { heldText } from "./jobs.js";
import { ago, bytes, clock, h, jobLink, nodeLink, now, redraw, span } from "./dom.js";

const FIELDS = [
  ["id", (info) => info.job_id], ["namespace", (info) => info.namespace], ["user", (info) => info.user],
  ["owner", (info) => info.owner || "the cluster (detached)"],
  ["parent", (info) => (info.parent ? jobLink(info.parent) : "")],
  ["group", (info) => (info.job_group ? `${info.job_group} as ${info.role}` : "")],
  ["launched", (info) => clock(info.launch_time)], ["started", (info) => clock(info.start_time)], ["ended", (info) => clock(info.end_time)],
  ["ended by", (info) => info.ended_by],
  ["retries", (info) => Object.entries(info.retries).map(([cause, count]) => `${count} after ${cause}`).join(", ")],
];

const progressText = ({ done, total, unit }) =>
  `${done}${total ? ` of ${total}` : ""}${unit ? ` ${unit}` : ""}${total ? ` (${Math.round((100 * done) / total)}%)` : ""}`;

function headline(info) {
  if (info.state === "pending") return info.reason || "waits";
  if (info.state === "running") {
    const health = info.attempts.filter((each) => !each.cause && !["", "well"].includes(each.health)).map((each) => each.health);
    const progress = info.progress ? `${progressText(info.progress)}, ${ago(info.progress.time)}` : "";
    return [`running for ${span(now() - info.start_time)}`, ...new Set(health), progress].filter(Boolean).join(" · ");
  }
  return info.error_message || `${info.state} after ${span(info.end_time - info.start_time)}`;
}

function timeline(info) {
  const end = Math.max(...info.attempts.map((each) => each.end_time ?? now()), info.launch_time ?? 0);
  const begin = Math.min(info.launch_time ?? Infinity, ...info.attempts.map((each) => each.place_time ?? each.start_time ?? end));
  const at = (time) => (100 * (time - begin)) / Math.max(end - begin, 0.001);
  return info.attempts.map((each) => {
    const placed = each.place_time ?? each.start_time ?? begin;
    const started = each.start_time ?? each.end_time ?? now();
    const ended = each.end_time ?? now();
    const kind = !each.cause ? "ran" : each.cause === "succeeded" ? "ended-good" : "ended-bad";
    const title = `${each.attempt_id} on ${each.node}: ${each.cause || "running"}, ${span(ended - started)}${each.message ? `\n${each.message}` : ""}`;
    return h("div", { class: "lane" },
      h("span", { class: "mono" }, each.attempt_id.split(":").slice(-2).join("."), " ", nodeLink(each.node)),
      h("div", { class: "track", title },
        h("i", { class: "starting", "left%": at(placed), "width%": at(started) - at(placed) }),
        h("i", { class: kind, "left%": at(started), "width%": at(ended) - at(started) })));
  });
}

// Devices that each living attempt holds, by its id.
function devicesOf(nodes) {
  const found = new Map();
  for (const node of nodes.values()) for (const [device, attempt] of Object.entries(node.granted)) {
    if (!found.has(attempt)) found.set(attempt, []);
    found.get(attempt).push(device);
  }
  return found;
}

function attempts(info, devices) {
  const row = (each) => h("tr", {},
    h("td", { class: "mono" }, each.attempt_id.split(":").slice(-2).join(".")), h("td", {}, nodeLink(each.node)),
    h("td", { class: "wide mono" }, (devices.get(each.attempt_id) ?? []).join(" ")),
    h("td", { class: "wide" }, clock(each.start_time)),
    h("td", {}, each.start_time ? span((each.end_time ?? now()) - each.start_time) : ""),
    h("td", {}, each.cause ? `${each.cause}${each.exit_code ? ` ${each.exit_code}` : ""}${each.signal ? ` (signal ${each.signal})` : ""}` : each.health || (each.start_time ? "running" : "starting")),
    h("td", { class: "wide" }, each.cause ? "" : each.memory_bytes ? bytes(each.memory_bytes) : ""),
    h("td", { class: "wide" }, each.peak_memory_bytes ? bytes(each.peak_memory_bytes) : ""),
    h("td", { class: "wide" }, each.cpu_s ? span(each.cpu_s) : ""),
    h("td", {}, each.message));
  return h("table", {},
    h("tr", {}, ["attempt", "machine"].map((name) => h("th", {}, name)), h("th", { class: "wide" }, "devices"), h("th", { class: "wide" }, "started"), h("th", {}, "time"), h("th", {}, "state"),
      ["memory", "peak", "CPU"].map((name) => h("th", { class: "wide" }, name)), h("th", {}, "message")),
    info.attempts.map(row));
}

// Calls that the process of an actor serves.
function drawCalls({ calls }) {
  const { actors, more_actors: more } = calls;
  return [
    h("h2", {}, "Calls"),
    ...actors.flatMap(({ name, metrics }) => [
      h("p", {}, `${name}: ${metrics.running} running, ${metrics.queued} queued, ${metrics.calls} ended, of them ${metrics.errors} with errors and ${metrics.cancelled} cancelled; time from arrival to end:`),
      histogram(metrics)]),
    more ? h("p", { class: "dim" }, `and ${more} more actors`) : null,
    h("h2", {}, "Called by"), callers(calls.callers, calls.more_callers),
  ];
}

// The log: lines are appended as they come; the oldest are dropped.
const LINES = 5000;
class Log {
  constructor(id) {
    this.id = id;
    this.lines = h("div", { class: "log mono", tabindex: "0", role: "log" });
    this.search = h("input", { type: "search", placeholder: "only lines with…", "aria-label": "search the log" });
    this.stream = h("select", { "aria-label": "stream" }, [["", "all output"], ["out", "stdout"], ["err", "stderr"], ["sys", "Fray's messages"]].map(([value, text]) => h("option", { value }, text)));
    this.tree = h("input", { type: "checkbox" });
    this.state = h("span", { class: "dim" });
    let timer;
    this.search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => this.open(), 300); });
    for (const each of [this.stream, this.tree]) each.addEventListener("change", () => this.open());
    this.element = h("div", {}, h("div", { class: "tools" }, this.search, this.stream, h("label", {}, this.tree, " with children"), this.state), this.lines);
    this.open();
  }

  open() {
    this.close();
    this.lines.replaceChildren();
    this.state.textContent = "following";
    const query = new URLSearchParams({ follow: 1, tail: 1000, contains: this.search.value, stream: this.stream.value, tree: this.tree.checked ? 1 : 0 });
    const source = (this.source = new EventSource(`/api/jobs/${encodeURIComponent(this.id)}/logs?${query}`));
    let fresh = true; // after a lost connection the end of the log comes again
    source.onopen = () => { fresh = true; };
    source.onmessage = (event) => {
      const found = JSON.parse(event.data);
      if (found === null) {
        this.state.textContent = this.lines.childElementCount ? "all of it" : "no lines";
        source.close();
        return;
      }
      if (fresh) this.lines.replaceChildren();
      fresh = false;
      const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
      this.lines.append(...found.map(([time, stream, kind, attempt, text]) =>
        h("div", { class: kind === "line" ? stream : kind, title: `${clock(time)} ${attempt}` }, text || "\u00a0")));
      while (this.lines.childElementCount > LINES) this.lines.firstElementChild.remove();
      if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
    };
    source.onerror = () => { if (source.readyState !== EventSource.OPEN) this.state.textContent = "reconnecting…"; };
  }

  close() { this.source?.close(); }
}

export const job = {
  tables: ["held", "nodes"],
  make({ live, ask, id }) {
    const top = h("div");
    const said = h("p", { class: "bad failed", role: "alert" });
    const chain = h("pre", { id: "chain" });
    const lanes = h("div", { class: "timeline" });
    const list = h("div");
    const events = h("div");
    const details = h("dl");
    const stacks = h("div");
    const calls = h("div", { id: "calls" });
    const act = async (what, body) => {
      try { said.textContent = ""; return await live.act(`/api/jobs/${encodeURIComponent(id)}/${what}`, body); }
      catch (error) { said.textContent = error.message; return null; }
    };
    const stop = h("button", { class: "danger", id: "stop", type: "button", disabled: true, onclick: async () => {
      const reason = await ask(`Stop ${id}, and all that it owns?`, "stop", true);
      if (reason !== null) await act("stop", { reason });
    } }, "stop");
    const again = h("button", { class: "danger", id: "requeue", type: "button", disabled: true, onclick: async () => {
      const reason = await ask(`End this attempt of ${id}, which then waits for machines again?`, "requeue", true);
      if (reason !== null) await act("requeue", { reason });
    } }, "requeue");
    let isAsking = false; // for stacks
    const look = h("button", { id: "stacks", type: "button", disabled: true, onclick: async () => {
      isAsking = true;
      drawButtons();
      const found = await act("stacks");
      isAsking = false;
      drawButtons();
      if (found) redraw(stacks, h("h2", {}, "Stacks"), Object.entries(found).map(([attempt, text]) => h("pre", {}, `== ${attempt}\n${text}`)));
    } }, "stacks");
    const flame = new Flame(() => act("stacks"));
    const burn = h("button", { id: "profile", type: "button", disabled: true, onclick: async () => {
      isAsking = true;
      drawButtons();
      await flame.run();
      isAsking = false;
      drawButtons();
    } }, "flame graph");
    const log = new Log(id);
    const element = h("div", {}, top, h("div", { class: "tools" }, stop, again, look, burn), said, chain,
      h("h2", {}, "Attempts"), lanes, list, calls, stacks, flame.element, h("h2", {}, "Log"), log.element, h("h2", {}, "Events"), events, h("h2", {}, "Details"), details);

    function drawButtons() {
      for (const each of [look, burn]) each.disabled = isAsking || !live.status?.may.stacks;
    }

    function draw() {
      const found = live.document("job");
      if (!found) {
        redraw(top, h("h1", {}, id), h("p", { class: "headline" }, live.errors.get("job") || "loading…"));
        return;
      }
      const { info, explanation } = found;
      const may = live.status?.may ?? {};
      const ended = ["succeeded", "failed", "stopped"].includes(info.state);
      redraw(top, h("h1", {}, info.name, " ", h("span", { class: info.state }, info.state)), h("p", { class: `headline ${info.state === "failed" ? "failed" : ""}` }, headline(info)));
      stop.hidden = ended;
      stop.disabled = !may.stop;
      stop.title = may.stop ? "" : `role ${live.status?.role} may not stop jobs`;
      again.hidden = info.state !== "running";
      again.disabled = !may.requeue;
      again.title = may.requeue ? "" : `role ${live.status?.role} may not requeue jobs`;
      look.hidden = info.state !== "running";
      burn.hidden = look.hidden;
      drawButtons();
      redraw(chain, explanation);
      redraw(lanes, timeline(info));
      redraw(list, info.attempts.length ? attempts(info, devicesOf(live.rows("nodes"))) : h("p", { class: "dim" }, "none yet"));
      redraw(calls, info.attempts.filter((each) => each.calls).flatMap(drawCalls));
      redraw(events, h("table", {}, found.events.map((each) => h("tr", {}, h("td", { class: "mono" }, clock(each.time)), h("td", {}, each.what), h("td", {}, each.text)))));
      redraw(details, [...FIELDS, ["held, or its cost", () => heldText(live.rows("held").get(info.job_id))]].map(([name, value]) => [name, value(info)]).filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat(),
        Object.entries(Object.assign({}, ...info.attempts.filter((each) => !each.cause).map((each) => Object.fromEntries(Object.entries(each.ports).map(([name, port]) => [name, `${each.host}:${port}`]))))).map(([name, where]) => [h("dt", {}, `port ${name}`), h("dd", {}, where)]).flat());
      for (const each of info.attempts) if (each.captured && !stacks.childElementCount) redraw(stacks, h("h2", {}, "Stacks"), h("pre", {}, `== ${each.attempt_id}\n${each.captured}`));
    }
    draw();
    return {
      element, close: () => { log.close(); flame.close(); }, update: draw,
      tick() {
        const info = live.document("job")?.info;
        if (info?.state === "running") draw();
      },
    };
  },
};
