// The page: views, the state of the server, the key.

import { json, onUnauthorized } from "./api.js";
import { Chat } from "./chat.js";
import { at, make, shown } from "./dom.js";
import { Shapes } from "./shapes.js";

const POLL = 2000;
const shapes = new Shapes();
const chat = new Chat(shapes);
let known = false;
let accepting = false;
let asking = null;

onUnauthorized((wrong) => {
  asking ??= ask(wrong).finally(() => {
    asking = null;
  });
  return asking;
});

async function ask(wrong) {
  at("key-title").textContent = wrong ? "API key: the last one was not accepted" : "API key";
  const input = at("key");
  input.value = "";
  const form = at("key-form");
  let given = null;
  const submit = () => {
    given = input.value.trim() || null;
  };
  form.addEventListener("submit", submit);
  await shown(at("key-dialog"));
  form.removeEventListener("submit", submit);
  if (given && !at("model").value) setTimeout(() => models().catch(() => {}), 0);
  return given;
}

for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}

const tabs = [at("tab-chat"), at("tab-shapes")];

function select(tab) {
  for (const one of tabs) {
    const on = one === tab;
    one.setAttribute("aria-selected", String(on));
    one.tabIndex = on ? 0 : -1;
    at(one.getAttribute("aria-controls")).hidden = !on;
  }
  shapes.watch(tab === at("tab-shapes"));
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    select(other);
    other.focus();
  });
}

/** Reads the names of the models, which also asks for a key where one is needed. */
async function models() {
  known = true;
  const { data } = await json("/v1/models");
  at("model").replaceChildren(...data.map((m) => make("option", { value: m.id }, m.id)));
  at("served").textContent = data[0]?.id ?? "";
  const { takes_images: images } = await json("/stats", {});
  for (const button of ["attach", "camera"]) at(button).hidden = !images;
  await shapes.read().catch(() => {});
}

/** Shows whether the server is up, and how far its start or warm-up is. */
async function poll() {
  let health = null;
  try {
    const response = await fetch(new URL("health", document.baseURI), { cache: "no-store" });
    health = await response.json();
  } catch {
    // Unreachable: shown below.
  }
  const progress = health?.progress;
  const name = at("model").value;
  at("dot").className = `dot ${health?.accepting ? (progress ? "busy" : "good") : health ? "busy" : "bad"}`;
  at("served").textContent = health ? [name, health.device, health.accepting ? "" : health.phase].filter(Boolean).join(" · ") : "The server cannot be reached.";
  at("banner").hidden = !progress;
  if (progress) {
    const left = progress.eta_seconds > 0 ? `, about ${Math.ceil(progress.eta_seconds)} s left` : "";
    const count = progress.total ? ` (${progress.done} of ${progress.total})` : "";
    at("banner-text").textContent = `${health.accepting ? "Warm-up" : "Starting"}: ${progress.phase}${count}${left}`;
    at("banner-bar").value = progress.percent;
  }
  if (health?.accepting && !accepting && known) await shapes.read().catch(() => {}); // planned while it started
  accepting = Boolean(health?.accepting);
  if (health && !known && !asking) models().catch((error) => chat.fault(error.message));
  setTimeout(poll, POLL);
}

poll();
