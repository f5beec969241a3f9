// Capacity over time by kind and zone, as areas that are stacked up to the total.

import { amount, h, redraw, svg } from "./dom.js";
import { asked, SPANS } from "./history.js";

const PARTS = ["used", "reserved", "quarantined", "closed", "idle"];
const ALL = "*";

// The sums over the zones that are shown, by kind and time.
export function sumsOf(samples, zone) {
  const kinds = new Map();
  for (const sample of samples) {
    if (zone !== ALL && sample.zone !== zone) continue;
    if (!kinds.has(sample.kind)) kinds.set(sample.kind, new Map());
    const times = kinds.get(sample.kind);
    const sum = times.get(sample.at) ?? { total: 0, used: 0, reserved: 0, quarantined: 0, closed: 0, idle: 0 };
    for (const name of Object.keys(sum)) sum[name] += sample[name];
    times.set(sample.at, sum);
  }
  return kinds;
}

// One area of each part; a period in which nothing was recorded stays empty.
function areas(kind, times, { begin, end, period_s }) {
  const most = Math.max(...[...times.values()].map((sum) => sum.total)) || 1;
  const x = (time) => ((1000 * (Math.min(Math.max(time, begin), end) - begin)) / (end - begin)).toFixed(2);
  const y = (value) => (100 - (100 * value) / most).toFixed(2);
  const paths = new Map(PARTS.map((part) => [part, ""]));
  for (const [at, sum] of times) {
    let below = 0;
    for (const part of PARTS) {
      const above = below + sum[part];
      if (sum[part] > 0) paths.set(part, `${paths.get(part)}M${x(at)} ${y(below)}H${x(at + period_s)}V${y(above)}H${x(at)}Z`);
      below = above;
    }
  }
  return svg("svg", { class: "chart areas", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `${kind} over time: ${PARTS.join(", ")}, at most ${amount(kind, most)} in all` },
    ...PARTS.filter((part) => paths.get(part)).map((part) => svg("path", { class: `area ${part}`, d: paths.get(part) })));
}

function card(kind, times, current, range) {
  const has = (part) => [...times.values()].some((sum) => sum[part] > 0) || current?.[part] > 0;
  return h("div", { class: "card", "data-over-time": kind },
    h("h2", {}, kind), areas(kind, times, range),
    h("div", { class: "keys dim" }, PARTS.filter(has).map((part) => h("span", {}, h("i", { class: `key ${part}` }), `${part} ${amount(kind, current?.[part] ?? 0)}`))));
}

export function capacityOverTime(page) {
  const cards = h("div", { class: "cards", id: "over-time" });
  const zones = h("select", { "aria-label": "zone", onchange: () => draw() });
  let answer = null;

  function draw() {
    if (!answer) return;
    const zone = zones.value; // empty: machines without a zone
    const now = sumsOf(answer.current, zone);
    const sums = sumsOf(answer.samples, zone);
    // The period that has begun, if nothing was recorded in it yet.
    const last = answer.end - (answer.end % answer.period_s);
    for (const [kind, times] of now) {
      if (!sums.has(kind)) sums.set(kind, new Map());
      if (!sums.get(kind).has(last)) sums.get(kind).set(last, [...times.values()][0]);
    }
    const found = [...sums].sort(([one], [other]) => (one < other ? -1 : 1));
    redraw(cards, found.length
      ? found.map(([kind, times]) => card(kind, times, [...(now.get(kind)?.values() ?? [])][0], answer))
      : h("p", { class: "dim" }, "no machine was there in that time"));
  }

  const asking = asked({
    ...page, path: "/api/capacity",
    fields: [{ name: "since_s", label: "time", initial: "86400", options: SPANS }],
    show(found) {
      answer = found;
      const names = [...new Set([...found.samples, ...found.current].map((sample) => sample.zone))].sort();
      const chosen = zones.options.length ? zones.value : ALL;
      zones.replaceChildren(...[[ALL, "all zones"], ...names.map((name) => [name, name || "no zone"])].map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
      zones.hidden = names.length < 2;
      draw();
    },
  });
  asking.tools.append(zones);
  return { element: h("div", {}, h("h2", {}, "Capacity over time"), asking.tools, asking.said, cards), tick: asking.tick };
}
