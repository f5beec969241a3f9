// Elements and texts. Everything that comes from users is put into the page as text nodes, never as markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width%") element.style.width = `${value}%`;
    else if (name === "left%") element.style.left = `${value}%`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== ""));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A part of a view that is drawn again as a whole when its data have changed. A selection in it is left alone.
export function redraw(element, ...children) {
  const selected = document.getSelection();
  if (selected && !selected.isCollapsed && element.contains(selected.anchorNode)) return;
  element.replaceChildren(...children.flat().filter((child) => child !== undefined && child !== null && child !== ""));
}

let offset = 0; // seconds that the server's clock is ahead of this one
export const setClock = (now) => { offset = now - Date.now() / 1000; };
export const now = () => Date.now() / 1000 + offset;

export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "";
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m${String(s % 60).padStart(2, "0")}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(s / 86400)}d${String(Math.floor((s % 86400) / 3600)).padStart(2, "0")}h`;
}
export const ago = (time) => (time ? `${span(now() - time)} ago` : "");
export function clock(time) {
  if (!time) return "";
  const date = new Date(time * 1000);
  const text = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? text : `${date.toLocaleDateString("sv")} ${text}`;
}
export function bytes(amount) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (amount >= 1024 && unit < units.length - 1) { amount /= 1024; unit += 1; }
  return `${unit && amount < 100 ? amount.toFixed(1).replace(/\.0$/, "") : Math.round(amount)} ${units[unit]}`;
}
export const number = (amount) => String(Math.round(amount * 100) / 100);
export const amount = (resource, value) => (resource === "memory" ? bytes(value) : number(value));

// The address: #/view/id?name=value. Views keep what the reader has chosen in it.
export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/");
  return { view: view || "overview", id: decodeURIComponent(rest.join("/")), query: new URLSearchParams(query || "") };
}
export function keep(name, value) {
  const { query } = place();
  if (value === "" || value === null) query.delete(name);
  else query.set(name, value);
  const [path] = location.hash.split("?");
  history.replaceState(null, "", `${path || "#/"}${query.size ? `?${query}` : ""}`);
}
export const jobLink = (id, text) => h("a", { href: `#/job/${encodeURIComponent(id)}`, title: id }, text ?? id);
export const nodeLink = (name) => h("a", { href: `#/machine/${encodeURIComponent(name)}` }, name);
