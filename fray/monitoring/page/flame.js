// A flame graph of a job, of stacks that were captured a few times one after the other: wide is what was often there.

import { h, redraw, svg } from "./dom.js";

const CAPTURES = 25;
const HEIGHT = 18;
const OURS = /\/fray\/(runtime|node|net)\/|\/trio\/_|^<frozen runpy>/;

// Stacks of one attempt, outermost frame first, as py-spy, faulthandler and the loop of the job write them.
export function stacksIn(text) {
  const found = [];
  let stack = null;
  let outermostFirst = false;
  for (const line of text.split("\n")) {
    const thread = line.match(/^(?:Current t|T)hread (\S+)(?: \(([^)]*)\))?:?(?: "(.*)")?/);
    const task = line.match(/^\s*task (.*)/);
    const frame = line.match(/^\s+(?:File "(.+)", line (\d+) in (.+)|(\S+) \((.+):(\d+)\))$/);
    if (thread) {
      const isIdle = (thread[2] ?? "").startsWith("idle");
      stack = { root: `thread ${thread[3] ?? thread[1]}`, isIdle, frames: [] };
      outermostFirst = false;
      found.push(stack);
    } else if (task) {
      stack = { root: `task ${task[1]}`, isIdle: true, frames: [] };
      outermostFirst = true;
      found.push(stack);
    } else if (frame && stack) {
      const name = frame[3] ?? frame[4];
      const file = frame[1] ?? frame[5];
      if (OURS.test(file)) continue;
      const shown = { name, file };
      if (outermostFirst) stack.frames.push(shown);
      else stack.frames.unshift(shown);
    }
  }
  return found.filter((each) => each.frames.length);
}

const node = (name, title) => ({ name, title, count: 0, below: new Map() });

export function add(root, stacks) {
  for (const { root: thread, frames } of stacks) {
    let at = root;
    at.count += 1;
    for (const { name, title } of [{ name: thread, title: thread }, ...frames.map(({ name, file }) => ({ name, title: `${name} (${file})` }))]) {
      if (!at.below.has(title)) at.below.set(title, node(name, title));
      at = at.below.get(title);
      at.count += 1;
    }
  }
}

function draw(root, top, zoom) {
  const boxes = [];
  let depth = 0;
  const place = (each, left, level) => {
    depth = Math.max(depth, level + 1);
    const part = (100 * each.count) / top.count;
    const box = svg("svg", { x: `${left}%`, y: level * HEIGHT, width: `${part}%`, height: HEIGHT - 1, class: "frame" },
      svg("rect", { width: "100%", height: "100%", class: `f${level % 4}` }), svg("text", { x: 3, y: 13 }, each.name),
      svg("title", {}, `${each.title}: ${each.count} of ${root.count} (${Math.round((100 * each.count) / root.count)}%)`));
    box.addEventListener("click", () => zoom(each === top ? root : each));
    boxes.push(box);
    let at = left;
    for (const child of [...each.below.values()].sort((a, b) => b.count - a.count)) {
      place(child, at, level + 1);
      at += (100 * child.count) / top.count;
    }
  };
  place(top, 0, 0);
  return svg("svg", { class: "flame", height: depth * HEIGHT, role: "img", "aria-label": "flame graph" }, ...boxes);
}

export class Flame {
  // capture() -> stacks by attempt; null if it failed.
  constructor(capture) {
    this.capture = capture;
    this.element = h("div", { id: "flame" });
  }

  async run() {
    this.running = node("all", "all");
    this.waiting = node("all", "all");
    this.closed = false;
    for (let number = 1; number <= CAPTURES && !this.closed; number += 1) {
      const found = await this.capture();
      if (found === null) return;
      const stacks = Object.values(found).flatMap(stacksIn);
      add(this.running, stacks.filter((each) => !each.isIdle));
      add(this.waiting, stacks.filter((each) => each.isIdle));
      this.show(number);
    }
  }

  show(number) {
    const graph = (title, root) => {
      if (!root.count) return [];
      const place = h("div");
      const zoom = (top) => place.replaceChildren(draw(root, top, zoom));
      zoom(root);
      return [h("h2", {}, title), place];
    };
    redraw(this.element, h("p", { class: "dim", id: "captures" }, `${number} of ${CAPTURES} captures; click on a frame to see it alone`),
      graph("Running", this.running), graph("Waiting: idle threads, Trio tasks", this.waiting),
      this.running.count + this.waiting.count ? null : h("p", { class: "dim" }, "no process of this job has stacks of Python"));
  }

  close() { this.closed = true; }
}
