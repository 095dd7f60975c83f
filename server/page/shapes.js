// Shapes and memory: /buckets and /stats, read again every second while they are on view.

import { json } from "./api.js";
import { at, bytes, count, make } from "./dom.js";

const EVERY = 1000;
const COLOURS = 8;

export class Shapes {
  constructor() {
    this.planned = [];
    this.timer = 0;
    this.before = null;
  }

  /** The planned buckets as last read. */
  buckets() {
    return this.planned;
  }

  /** Reads the buckets once, for the captions of images. */
  async read(quiet = true) {
    const answer = await json("/buckets", { quiet });
    this.planned = answer.buckets;
    return answer;
  }

  /** Starts or stops reading again and again. */
  watch(on) {
    clearTimeout(this.timer);
    this.timer = 0;
    if (on) this.turn();
  }

  async turn() {
    try {
      const [shapes, stats] = await Promise.all([this.read(false), json("/stats", {})]);
      this.show(shapes, stats);
    } catch (error) {
      at("bucket-note").textContent = error.message;
    }
    if (!at("shapes").hidden) this.timer = setTimeout(() => this.turn(), EVERY);
  }

  show(shapes, stats) {
    const now = { at: performance.now(), tokens: stats.generation_tokens, ...stats.speculation };
    const entries = [...gauges(shapes, stats), speed(this.before, now)].map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    this.before = now;
    at("gauges").replaceChildren(...entries);
    this.memory(shapes);
    const rows = [...shapes.buckets, ...shapes.unplanned].map(row);
    at("buckets").replaceChildren(...rows);
    const captured = shapes.buckets.filter((b) => b.state === "captured").length;
    at("bucket-note").textContent = shapes.buckets.length
      ? `${count(shapes.buckets.length)} planned, ${count(captured)} captured as graphs; padding is the share of the computed work that is not real`
      : "This device takes every size as it is; use by stage is listed.";
  }

  /** The ledger as a bar; its rows sum to the whole. */
  memory(shapes) {
    const ledger = (shapes.ledger ?? []).filter((r) => r.bytes > 0);
    const total = shapes.total ?? 0;
    at("memory-total").textContent = total ? `${bytes(total)} in all` : "No ledger: this device divides no memory of its own.";
    at("ledger").hidden = !total;
    const largest = [...ledger].sort((a, b) => b.bytes - a.bytes);
    const colour = new Map(largest.map((r, i) => [r.name, `f${Math.min(i, COLOURS - 1)}`]));
    at("ledger").replaceChildren(
      ...ledger.map((r) => {
        const part = make("span", { className: colour.get(r.name), title: `${r.name}: ${bytes(r.bytes)}` });
        part.style.flexGrow = String(r.bytes / total);
        return part;
      }),
    );
    at("ledger").setAttribute("aria-label", ledger.map((r) => `${r.name} ${bytes(r.bytes)}`).join(", "));
    at("ledger-legend").replaceChildren(
      ...ledger.map((r) => make("li", {}, make("i", { className: colour.get(r.name) }), `${r.name} ${bytes(r.bytes)}`)),
    );
    const pools = Object.entries(shapes.pools ?? {});
    at("pools").replaceChildren(
      ...pools.map(([name, p]) => make("li", {}, `${name} graphs: ${bytes(p.spent)} of ${bytes(p.budget)} spent`)),
    );
  }
}

function share(part, whole) {
  return whole ? `${count(part)} of ${count(whole)} (${Math.round((100 * part) / whole)} %)` : "none";
}

function gauges(shapes, stats) {
  const found = [
    ["Device", `${stats.device ?? "loading"} ${stats.dtype ?? ""}`.trim()],
    ["Requests running", count(stats.running)],
    ["Requests waiting", count(stats.waiting)],
    ["KV blocks in use", share(stats.kv_blocks.used, stats.kv_blocks.total)],
    ["Prefix cache hits, tokens", share(stats.prefix_cache.hits, stats.prefix_cache.queries)],
    ["Image arena rows in use", share(stats.image_arena.used, stats.image_arena.total)],
    ["Encoded images found again", share(stats.image_arena.hits, stats.image_arena.queries)],
    ["Drafted tokens accepted", share(stats.speculation.accepted_tokens, stats.speculation.draft_tokens)],
    ["Tokens in / out", `${count(stats.prompt_tokens)} / ${count(stats.generation_tokens)}`],
    ["Preemptions", count(stats.preemptions)],
    ["Compiled while serving", count(shapes.lazy_compiles + shapes.recompiles)],
    ["Engine restarts", count(stats.restarts)],
  ];
  if (shapes.warmup) found.push(["Warm-up", `${shapes.warmup.percent} %, ${Math.ceil(shapes.warmup.eta_seconds)} s left`]);
  return found;
}

/** Tokens a second since the last reading, and how many of the drafts of that time were accepted. */
function speed(before, now) {
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const name = "Tokens a second, drafts accepted";
  if (!(seconds > 0)) return [name, "–"];
  const since = (key) => Math.max(now[key] - before[key], 0); // an engine that started anew counts from 0
  return [name, `${(since("tokens") / seconds).toFixed(1)}, ${share(since("accepted_tokens"), since("draft_tokens"))}`];
}

function row(b) {
  const state = b.failed ? "failed" : b.planned ? b.state : "unplanned";
  return make(
    "tr",
    {},
    make("td", {}, b.stage),
    make("td", {}, b.bucket),
    make("td", { className: `state ${state}` }, state),
    make("td", { className: "n" }, count(b.hits)),
    make("td", { className: "n" }, b.padded_tokens ? `${(100 * b.padding).toFixed(1)} %` : "–"),
    make("td", { className: "n" }, b.seconds.toFixed(2)),
    make("td", { className: "n" }, b.bytes ? bytes(b.bytes) : "–"),
  );
}
