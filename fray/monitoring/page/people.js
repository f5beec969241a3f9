// Users, and the audit log: for roles that may read them.

import { ago, clock, h, keep, redraw } from "./dom.js";
import { Grid } from "./grid.js";

export const users = {
  tables: ["users", "usage"],
  make({ live }) {
    const list = h("div");
    function draw() {
      const error = live.errors.get("users");
      const shares = new Map((live.document("usage")?.users ?? []).map((user) => [user.user, user]));
      const found = [...live.rows("users").values()];
      redraw(list, error ? h("p", { class: "failed" }, error) : found.length ? h("table", {},
        h("tr", {}, ["user", "role", "keys", "last seen", "since", "share"].map((name) => h("th", {}, name))),
        found.map((user) => h("tr", {}, [user.user, user.role, user.keys, ago(user.seen_at), clock(user.created_at), shares.has(user.user) ? `${(100 * shares.get(user.user).share).toFixed(1)}%` : ""].map((value) => h("td", {}, value))))) : h("p", { class: "dim" }, live.has("users") ? "no users have keys" : "loading…"));
    }
    draw();
    return { element: list, update: draw };
  },
};

const columns = [
  { name: "at", title: "time", width: "150px", value: (each) => each.at, cell: (each) => clock(each.at) },
  { name: "user", title: "user", width: "minmax(70px, 110px)", value: (each) => each.user, cell: (each) => each.user || each.role },
  { name: "action", title: "action", width: "minmax(90px, 150px)", value: (each) => each.action, cell: (each) => each.action },
  { name: "target", title: "target", width: "minmax(80px, 2fr)", value: (each) => each.target, cell: (each) => h("span", { title: each.target }, each.target) },
  { name: "outcome", title: "outcome", width: "minmax(80px, 2fr)", wide: true, value: (each) => each.outcome, cell: (each) => h("span", { title: each.outcome, class: each.outcome === "done" ? "" : "failed" }, each.outcome) },
  { name: "remote", title: "from", width: "minmax(80px, 1fr)", wide: true, value: (each) => each.remote, cell: (each) => each.remote },
];

export const audit = {
  tables: ["audit"],
  make({ live, query }) {
    let text = query.get("q") ?? "";
    const grid = new Grid({ columns, sort: "-at", match: (each) => !text || `${each.user} ${each.action} ${each.target} ${each.outcome}`.toLowerCase().includes(text.toLowerCase()) });
    const counts = h("span", { class: "dim", id: "counts" });
    function draw() {
      const rows = live.document("audit") ?? [];
      grid.set(rows);
      counts.textContent = live.errors.get("audit") || `${grid.found.length} of the last ${rows.length} records`;
    }
    const filter = h("input", { type: "search", placeholder: "user, action, target…", "aria-label": "filter", value: text, oninput: (event) => { text = event.target.value; keep("q", text); draw(); } });
    draw();
    return { element: h("div", {}, h("div", { class: "tools" }, filter, counts), grid.element), update: draw, close: () => grid.resize.disconnect() };
  },
};
