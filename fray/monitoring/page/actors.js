// Actors: what they do now, how long calls take, and who calls whom.

import { clock, h, jobLink, keep, nodeLink, redraw } from "./dom.js";
import { Grid } from "./grid.js";

// As ActorMetrics: bucket i has the calls that took less than 2 ** (i - 20) seconds, and no less than half of that.
const bound = (index) => 2 ** (index - 20);
export function short(seconds) {
  if (seconds >= 60) return `${Math.round(seconds / 60)} min`;
  if (seconds >= 1) return `${Math.round(seconds)} s`;
  return seconds >= 0.001 ? `${Math.round(1000 * seconds)} ms` : `${Math.round(1e6 * seconds)} µs`;
}
export function within(metrics, share) {
  let still = share * metrics.latency_buckets.reduce((sum, count) => sum + count, 0);
  for (const [index, count] of metrics.latency_buckets.entries()) {
    still -= count;
    if (count && still <= 0) return bound(index);
  }
  return null;
}
// The job of an attempt; a driver has a session and no job.
export const process = (incarnation) => (incarnation.includes(":") ? jobLink(incarnation.split(":")[0], incarnation) : h("span", {}, `driver ${incarnation}`));

export function histogram({ latency_buckets: buckets }) {
  const first = buckets.findIndex((count) => count);
  if (first < 0) return h("p", { class: "dim" }, "no calls have ended");
  const most = Math.max(...buckets);
  return h("table", { class: "histogram" }, buckets.slice(first).map((count, index) => h("tr", {},
    h("td", { class: "mono" }, `< ${short(bound(first + index))}`), h("td", { class: "mono" }, String(count)),
    h("td", {}, h("div", { class: "bar" }, h("i", { class: "used", "width%": (100 * count) / most }))))));
}

export const callers = (found, more) => (found.length ? h("table", { class: "callers" }, h("tr", {}, ["caller", "calls", "under way"].map((name) => h("th", {}, name))),
  found.map((each) => h("tr", {}, h("td", {}, process(each.incarnation)), h("td", {}, String(each.calls)), h("td", {}, String(each.running)))),
  more ? h("tr", {}, h("td", {}, `and ${more} more`)) : null) : h("p", { class: "dim" }, "none"));

const count = (name, title, value) => ({ name, title, width: "74px", value: (actor) => (actor.calls ? value(actor.calls) : null), cell: (actor) => (actor.calls ? String(value(actor.calls)) : "") });
const latency = (name, title, share) => ({ name, title, width: "80px", wide: true, value: (actor) => (actor.calls ? within(actor.calls, share) : null), cell: (actor) => { const found = actor.calls ? within(actor.calls, share) : null; return found === null ? "" : `< ${short(found)}`; } });

const columns = [
  { name: "name", title: "actor", width: "minmax(110px, 2fr)", value: (actor) => actor.name, cell: (actor) => (actor.served ? h("span", { title: actor.actor_id }, actor.name) : jobLink(actor.actor_id, actor.name)) },
  { name: "status", title: "state", width: "90px", value: (actor) => actor.status, cell: (actor) => h("span", { class: { ready: "running", creating: "pending", restarting: "pending" }[actor.status] ?? actor.status }, actor.status) },
  count("running", "running", (calls) => calls.running),
  count("queued", "queued", (calls) => calls.queued),
  count("calls", "ended", (calls) => calls.calls),
  count("errors", "errors", (calls) => calls.errors),
  latency("p50", "half in", 0.5), latency("p99", "99 % in", 0.99),
  { name: "callers", title: "callers", width: "70px", wide: true, value: (actor) => actor.callers.length, cell: (actor) => String(actor.callers.length || "") },
  { name: "node", title: "machine", width: "minmax(70px, 1fr)", wide: true, value: (actor) => actor.node, cell: (actor) => (actor.node ? nodeLink(actor.node) : "") },
  { name: "restarts", title: "restarts", width: "70px", wide: true, value: (actor) => actor.restarts, cell: (actor) => String(actor.restarts || "") },
  { name: "started", title: "since", width: "90px", wide: true, value: (actor) => actor.started, cell: (actor) => clock(actor.started) },
  { name: "reason", title: "reason", width: "minmax(60px, 2fr)", wide: true, value: (actor) => actor.reason, cell: (actor) => h("span", { title: actor.reason }, actor.reason) },
];
const EDGES = 200;

export const actors = {
  tables: ["actors"],
  make({ live, query }) {
    let text = query.get("q") ?? "";
    const matches = (actor) => !text || `${actor.name} ${actor.namespace} ${actor.node} ${actor.reason}`.toLowerCase().includes(text.toLowerCase());
    const grid = new Grid({ columns, sort: "-running", whole: false, match: matches });
    const counts = h("span", { class: "dim", id: "counts" });
    const edges = h("div", { id: "edges" });
    function draw() {
      const rows = [...live.rows("actors").values()];
      grid.set(rows);
      counts.textContent = live.errors.get("actors") || (live.has("actors") ? `${grid.found.length} of ${rows.length} actors` : "loading…");
      const names = new Map(rows.filter((actor) => actor.incarnation).map((actor) => [actor.incarnation, actor]));
      const caller = (incarnation) => (names.has(incarnation) ? jobLink(incarnation.split(":")[0], names.get(incarnation).name) : process(incarnation));
      const found = rows.filter(matches).flatMap((actor) => actor.callers.map((each) => ({ actor, ...each })));
      found.sort((a, b) => b.running - a.running || b.calls - a.calls);
      redraw(edges, found.length ? h("table", {}, h("tr", {}, ["caller", "calls", "ended or under way", "under way"].map((name) => h("th", {}, name))),
        found.slice(0, EDGES).map((each) => h("tr", {}, h("td", {}, caller(each.incarnation)), h("td", {}, each.actor.name), h("td", {}, String(each.calls)), h("td", {}, String(each.running)))),
        found.length > EDGES ? h("tr", {}, h("td", {}, `and ${found.length - EDGES} more`)) : null) : h("p", { class: "dim" }, "no process has called an actor that reports its calls"));
    }
    const filter = h("input", { type: "search", placeholder: "name, namespace, machine…", "aria-label": "filter", value: text, oninput: (event) => { text = event.target.value; keep("q", text); draw(); } });
    draw();
    return { element: h("div", {}, h("div", { class: "tools" }, filter, counts), grid.element, h("h2", {}, "Who calls whom"), edges), update: draw, close: () => grid.resize.disconnect() };
  },
};
