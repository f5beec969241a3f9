// Reservations, machine groups with their machines, job groups.

import { clock, h, jobLink, nodeLink, now, redraw, span } from "./dom.js";

const head = (...names) => h("tr", {}, names.map((name) => h("th", {}, name)));
const cells = (...values) => h("tr", {}, values.map((value) => h("td", {}, value)));
const none = () => h("p", { class: "dim" }, "none");
const joined = (links) => h("span", {}, links.flatMap((link, index) => [index ? ", " : "", link]));

export const reservations = {
  tables: ["reservations", "gone_reservations", "groups", "job_groups"],
  make({ live, ask }) {
    const said = h("p", { role: "alert", class: "failed" });
    const held = h("div");
    const past = h("div", { id: "gone" });
    const groups = h("div");
    const units = h("div");
    const jobs = h("div");
    const element = h("div", {}, said, h("h2", {}, "Reservations"), held, h("h2", {}, "Reservations that are gone, of the last 7 days"), past, h("h2", {}, "Machine groups"), groups, h("h2", {}, "Their machines"), units, h("h2", {}, "Job groups"), jobs);
    const act = async (id, action, question) => {
      if ((await ask(question, action)) === null) return;
      try { said.textContent = ""; await live.act(`/api/reservations/${encodeURIComponent(id)}/${action}`); } catch (error) { said.textContent = error.message; }
    };
    function draw() {
      const may = live.status?.may ?? {};
      const found = [...live.rows("reservations").values()].reverse();
      const ended = (info) => ["closing", "ended"].includes(info.state);
      redraw(held, found.length ? h("table", {}, head("reservation", "state", "units", "machines", "jobs", "expires", "reason", ""), found.map((info) => cells(
        h("span", { title: info.reservation_id }, info.reservation_id), info.state, `${info.units.length} of ${info.min_units}–${info.max_units}`,
        joined(info.units.flatMap((unit) => unit.nodes).map(nodeLink)), joined(info.jobs.map((id) => jobLink(id))),
        ended(info) ? clock(info.ended_at) : `in ${span(info.expires_at - now())}`, info.reason,
        ended(info) ? "" : h("span", { class: "tools" },
          h("button", { type: "button", disabled: !may.renew, onclick: () => act(info.reservation_id, "renew", `Restart the time to live of ${info.reservation_id} (${span(info.ttl_s)})?`) }, "renew"),
          h("button", { type: "button", class: "danger", disabled: !may.release, onclick: () => act(info.reservation_id, "release", `Release ${info.reservation_id}, and end the jobs in it?`) }, "release"))))) : none());
      const gone = live.document("gone_reservations") ?? [];
      redraw(past, gone.length ? h("table", {}, head("reservation", "user", "units", "machines", "requested", "held after", "ended", "ended by", "reason"), gone.map((one) => cells(
        one.reservation_id, one.user, `${one.units_given} given of ${one.min_units}–${one.max_units}`, joined(one.nodes.map(nodeLink)), clock(one.created_at),
        one.held_at === null ? "never" : span(one.held_at - one.created_at), clock(one.ended_at), one.ended_by, one.reason))) : none());
      const fleet = live.document("groups") ?? { groups: [], machines: [] };
      redraw(groups, fleet.groups.length ? h("table", {}, head("group", "kind", "wanted", "requested", "seen", "joined", "leaving", "min–max", "cost/h", "trouble"), fleet.groups.map((group) => cells(
        group.name, group.kind, group.wanted, group.asked, group.seen, group.joined, group.leaving, `${group.min}–${group.max}`, group.cost_per_hour.toFixed(2),
        [group.stopped, group.trouble, ...group.backoffs.map((each) => `${each.zone}: ${each.kind}, for ${span(each.remaining_s)}${each.message ? `: ${each.message}` : ""}`)].filter(Boolean).join("; ")))) : none());
      redraw(units, fleet.machines.length ? h("table", {}, head("machine", "group", "zone", "phase", "age", "state", "message", "reason"), fleet.machines.slice(0, 500).map((unit) => cells(
        unit.nodes.length ? joined(unit.nodes.map(nodeLink)) : unit.name, unit.group, unit.zone, unit.phase, span(unit.age_s), unit.state, unit.provider_message, unit.reason))) : none());
      const sets = [...live.rows("job_groups").values()].reverse().slice(0, 200);
      redraw(jobs, sets.length ? h("table", {}, head("group", "state", "jobs", "launched", "reason"), sets.map((group) => cells(
        group.name, h("span", { class: group.state }, group.state), joined(group.members.slice(0, 20).map((member) => jobLink(member.job_id, member.name || member.job_id))), clock(group.launch_time), group.error_message || group.reason))) : none());
    }
    draw();
    return { element, update: draw };
  },
};
