// The page: its views by address, the stream of live tables, what it says about its connection, questions before actions.

import { h, place, redraw, setClock, span } from "./dom.js";
import { Live } from "./live.js";
import { overview } from "./overview.js";
import { jobs } from "./jobs.js";
import { job } from "./job.js";
import { machine, machines } from "./machines.js";
import { actors } from "./actors.js";
import { events, history } from "./history.js";
import { reservations } from "./reservations.js";
import { audit, users } from "./people.js";

// Each: {title, tables, make(page) -> {element, update(table, rows, gone), close()}}
const views = { overview, jobs, job, machines, machine, actors, reservations, history, events, users, audit };
const menu = ["overview", "jobs", "machines", "actors", "reservations", "history", "events", "users", "audit"];
const contact = document.getElementById("contact");
const notice = document.getElementById("notice");
let shown = null;
let address = "";

const live = new Live(
  (table, rows, gone) => {
    if (table === "status") drawMenu();
    schedule(table, rows, gone);
  },
  (state) => {
    const away = live.status?.away_s ?? 0;
    const said = {
      live: "",
      away: `The controller has not answered for ${span(away)}. What is shown is older; this page reconnects by itself.`,
      lost: "No connection to fray dashboard. What is shown is older; this page reconnects by itself.",
      key: "fray dashboard was started again with another key: open the address that it has printed.",
    }[state];
    notice.textContent = said;
    notice.hidden = !said;
    const who = live.status ? `${live.status.cluster} · ${live.status.user || "token"} (${live.status.role})` : "";
    contact.textContent = state === "live" ? who : "not connected";
  },
  setClock,
);

// Changes are drawn once a frame, however many there were.
const waiting = new Map();
function schedule(table, rows, gone) {
  if (!waiting.size) requestAnimationFrame(() => {
    const changes = [...waiting];
    waiting.clear();
    for (const [name, keys] of changes) shown?.update(name, keys);
  });
  const keys = waiting.get(table) ?? new Set();
  for (const row of rows) keys.add(row[0]);
  for (const key of gone) keys.add(key);
  waiting.set(table, keys);
}

function drawMenu() {
  const may = live.status?.may ?? {};
  const { view } = place();
  const current = { job: "jobs", machine: "machines" }[view] ?? view;
  const items = menu.filter((name) => (name !== "users" || may.users) && (name !== "audit" || may.audit));
  redraw(document.getElementById("nav"), items.map((name) =>
    h("a", { href: name === "overview" ? "#/" : `#/${name}`, "aria-current": name === current ? "page" : null }, name)));
}

// A question before an action. Resolves to the text that was entered ("" without one); null if the reader has said no.
export function ask(question, button, withReason = false) {
  const dialog = document.getElementById("ask");
  const reason = h("input", { name: "reason", placeholder: "reason (optional)", maxlength: 300 });
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.replaceChildren(h("form", { method: "dialog" },
      h("p", {}, question), withReason ? reason : null,
      h("div", { class: "tools" },
        h("button", { value: "yes", class: "danger" }, button),
        h("button", { value: "" }, "cancel"))));
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? reason.value : null);
    dialog.showModal();
  });
}

function open() {
  const here = place();
  const target = `${here.view}/${here.id}`;
  if (target === address) return;
  address = target;
  shown?.close?.();
  const view = views[here.view] ?? views.overview;
  document.title = `${here.id || here.view} – fray`;
  shown = view.make({ live, ask, id: here.id, query: here.query });
  document.getElementById("view").replaceChildren(shown.element);
  drawMenu();
  live.show(view.tables, here.view === "job" ? here.id : "");
}

function dress(theme) {
  document.documentElement.dataset.theme = theme;
}
const dark = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => localStorage.getItem("fray-theme") ?? (dark.matches ? "dark" : "light");
dark.addEventListener("change", () => dress(chosen()));
document.getElementById("theme").addEventListener("click", () => {
  localStorage.setItem("fray-theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  dress(chosen());
});
dress(chosen());
window.addEventListener("hashchange", open);
setInterval(() => shown?.tick?.(), 1000); // durations
open();
