// Tables that the server keeps up to date over one stream of events: whole after each connection, then what has changed.

export class Live {
  constructor(onChange, onContact, onClock) {
    this.tables = new Map();
    this.errors = new Map();
    this.columns = {};
    this.status = null;
    this.names = "";
    this.source = null;
    this.changed = onChange;
    this.contact = onContact;
    this.clock = onClock;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
  }

  // A page that is not in sight has no stream, so that open tabs cost nothing.
  show(names, job) {
    const query = new URLSearchParams({ tables: names.join(",") });
    if (job) query.set("job", job);
    this.names = query.toString();
    this.tables.clear();
    this.errors.clear();
    this.open();
  }

  close() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  open() {
    this.close();
    if (document.hidden) return;
    const source = (this.source = new EventSource(`/api/live?${this.names}`));
    source.onmessage = (event) => this.take(JSON.parse(event.data));
    source.onerror = () => {
      this.contact("lost");
      if (source.readyState === EventSource.CLOSED) this.retry = setTimeout(() => this.ask(), 1000);
    };
  }

  async ask() {
    const answer = await fetch("/api/tables/status").catch(() => null);
    if (answer?.status === 401) this.contact("key");
    else if (answer) return this.open();
    this.retry = setTimeout(() => this.ask(), 1000);
  }

  take(message) {
    if (message.now !== undefined) {
      this.clock(message.now);
      this.fresh = new Set(); // each table comes whole, once
      return;
    }
    const { table, rows, gone, error } = message;
    if (!this.fresh.has(table)) {
      this.fresh.add(table);
      this.tables.set(table, new Map());
    }
    const known = this.tables.get(table);
    const columns = this.columns[table];
    for (const row of rows) known.set(row[0], columns ? Object.fromEntries(columns.map((name, i) => [name, row[i]])) : row[1]);
    for (const key of gone) known.delete(key);
    this.errors.set(table, error || "");
    if (table === "status") {
      this.status = known.get("status");
      this.columns = this.status.columns;
      this.contact(this.status.away_s > 0 ? "away" : "live");
    }
    this.changed(table, rows, gone);
  }

  rows(table) { return this.tables.get(table) ?? new Map(); }
  document(table) { return this.rows(table).get(table); }
  has(table) { return this.tables.has(table); }

  // An answer that is asked for once; an Error has the sentence of the controller.
  async get(path) {
    return found(await fetch(path));
  }

  // An action of the reader: the answer, or an Error with the sentence of the controller.
  async act(path, body = {}) {
    const headers = { "X-Fray-Token": this.status.token, "Content-Type": "application/json" };
    return found(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
  }
}

async function found(answer) {
  const text = await answer.text();
  let value;
  try { value = JSON.parse(text); } catch { value = { error: text.trim() }; }
  if (!answer.ok) throw new Error(value.error);
  return value;
}
