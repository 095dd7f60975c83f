// The conversation: sending, streaming, stopping, trying again, editing.

import { ApiError, events, key, send } from "./api.js";
import { at, count, make, shown, written } from "./dom.js";
import { figure } from "./mosaic.js";
import { Images } from "./images.js";
import { OptionError, body, curl, python } from "./request.js";

const PROMPTS = ["What is in the picture?", "Which colours are there?", "What can you do?"];

export class Chat {
  /** @param {{buckets: () => object[]}} server what the page knows about the server */
  constructor(server) {
    this.server = server;
    this.messages = [];
    this.running = null;
    this.images = new Images({
      changed: () => this.settle(),
      fault: (text) => this.fault(text),
      buckets: () => server.buckets(),
      model: () => at("model").value,
    });
    this.listen();
    this.settle();
  }

  listen() {
    const draft = at("draft");
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    draft.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    draft.addEventListener("input", () => this.settle());
    at("stop").addEventListener("click", () => this.running?.abort());
    at("clear").addEventListener("click", () => this.clear());
    at("as-curl").addEventListener("click", () => this.snippet(curl, "As curl"));
    at("as-python").addEventListener("click", () => this.snippet(python, "As Python"));
    at("copy-snippet").addEventListener("click", () => copy(at("snippet").textContent, at("copy-snippet")));
    const prompts = PROMPTS.map((text) => make("button", { type: "button", on: { click: () => this.suggest(text) } }, text));
    at("prompts").replaceChildren(...prompts);
  }

  suggest(text) {
    at("draft").value = text;
    at("draft").focus();
    this.settle();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    at("messages").replaceChildren();
    this.fault("");
    this.settle();
    at("draft").focus();
  }

  fault(text) {
    at("fault").textContent = text;
    at("fault").hidden = !text;
  }

  /** Brings the buttons in line with what can be done. */
  settle() {
    const draft = at("draft");
    draft.style.height = "auto";
    draft.style.height = `${Math.min(draft.scrollHeight + 2, 192)}px`;
    at("send").hidden = this.running !== null;
    at("stop").hidden = this.running === null;
    at("send").disabled = !draft.value.trim() && !this.images.list.length;
    at("empty").hidden = this.messages.length > 0;
  }

  submit() {
    const draft = at("draft");
    const text = draft.value.trim();
    if (this.running || (!text && !this.images.list.length)) return;
    try {
      body([], "");
    } catch (error) {
      this.fault(error.message);
      return;
    }
    this.fault("");
    draft.value = "";
    this.append({ role: "user", text, images: this.images.take() });
    this.answer();
  }

  append(message) {
    message.item = make("li", { className: `message ${message.role}` });
    this.messages.push(message);
    at("messages").append(message.item);
    this.show(message);
    this.settle();
    message.item.scrollIntoView({ block: "end" });
    return message;
  }

  /** Asks for the next answer and shows it as it comes. */
  async answer() {
    const request = this.request();
    const message = this.append({ role: "assistant", text: "", thought: "", begun: performance.now() });
    this.running = new AbortController();
    this.settle();
    try {
      const sent = { ...request, stream: true, stream_options: { include_usage: true }, return_image_sizes: true };
      const response = await send("/v1/chat/completions", { body: sent, signal: this.running.signal });
      for await (const event of events(response)) this.take(message, event);
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped by you";
      else this.failed(message, error);
    }
    this.running = null;
    message.ended = performance.now();
    this.show(message);
    this.settle();
    if (!message.failed) at("announce").textContent = `Answer: ${message.text}`;
  }

  request() {
    return body(this.messages, at("model").value);
  }

  failed(message, error) {
    message.failed = true;
    message.error = error.message;
    if (!(error instanceof ApiError) && !(error instanceof OptionError)) throw error;
    if (error.retry) message.error += ` Try again in ${error.retry} s.`;
  }

  /** Adds one event of the stream to a message. */
  take(message, event) {
    if (event.usage) {
      message.usage = event.usage;
      this.measured(event.usage);
    }
    const choice = event.choices?.[0];
    if (!choice) return;
    const added = choice.delta?.content ?? "";
    const thought = choice.delta?.reasoning ?? "";
    const calls = choice.delta?.tool_calls ?? [];
    if ((added || thought || calls.length) && !message.first) message.first = performance.now();
    message.text += added;
    message.thought += thought;
    if (choice.finish_reason) message.finish = choice.finish_reason;
    this.soon(message);
  }

  /** Sizes of images, for those that /tokenize has not measured. */
  measured(usage) {
    const sizes = usage.prompt_tokens_details?.images ?? [];
    const images = this.messages.flatMap((m) => m.images ?? []);
    images.forEach((image, i) => {
      image.size ??= sizes[i] ?? null;
    });
    for (const message of this.messages) if (message.images?.length) this.show(message);
  }

  /** Shows a message at the next frame; tokens may come faster than frames. */
  soon(message) {
    if (message.frame) return;
    message.frame = requestAnimationFrame(() => {
      message.frame = 0;
      const list = at("messages").parentElement;
      const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
      this.show(message);
      if (follows) list.scrollTop = list.scrollHeight;
    });
  }

  show(message) {
    const parts = [make("p", { className: "who" }, message.role === "user" ? "You" : "Answer")];
    if (message.images?.length) {
      parts.push(make("div", { className: "images" }, ...message.images.map((p) => figure(p, this.server.buckets()))));
    }
    if (message.thought) parts.push(make("div", { className: "thought" }, ...written(message.thought)));
    parts.push(...written(message.text));
    if (message.failed) parts.push(make("p", { className: "fault" }, message.error));
    const foot = this.foot(message);
    if (foot.childNodes.length) parts.push(foot);
    message.item.classList.toggle("failed", Boolean(message.failed));
    message.item.replaceChildren(...parts);
  }

  foot(message) {
    const foot = make("div", { className: "foot" });
    const button = (text, click) => foot.append(make("button", { type: "button", on: { click } }, text));
    if (message.role === "user") {
      button("Edit", () => this.edit(message));
      return foot;
    }
    if (!message.ended) return foot;
    if (!message.failed || message.usage) foot.append(make("span", {}, figures(message)));
    button("Try again", () => this.retry(message));
    if (message.text) button("Copy", (event) => copy(message.text, event.currentTarget));
    return foot;
  }

  /** Drops an answer and what follows it, and asks for it again. */
  retry(message) {
    if (this.running) return;
    this.cut(this.messages.indexOf(message));
    this.answer();
  }

  /** Takes a message back into the entry, with its images, and drops what follows it. */
  edit(message) {
    this.running?.abort();
    this.cut(this.messages.indexOf(message));
    at("draft").value = message.text;
    this.images.put(message.images ?? []);
    this.settle();
    at("draft").focus();
  }

  cut(from) {
    for (const gone of this.messages.splice(from)) gone.item.remove();
    this.settle();
  }

  async snippet(make, title) {
    try {
      const draft = at("draft").value.trim();
      const pending = draft || this.images.list.length ? [{ role: "user", text: draft, images: this.images.list }] : [];
      const asked = [...this.messages, ...pending].filter((m) => !m.failed);
      while (asked.length && asked.at(-1).role === "assistant") asked.pop();
      at("snippet").textContent = make(body(asked, at("model").value), key() !== null);
    } catch (error) {
      this.fault(error.message);
      return;
    }
    at("snippet-title").textContent = title;
    await shown(at("snippet-dialog"));
  }
}

/** Times and tokens of an answer. The rate counts the tokens after the first over the time after the first. */
function figures(message) {
  const parts = [];
  const usage = message.usage;
  if (message.first) parts.push(`first token ${Math.round(message.first - message.begun)} ms`);
  if (usage) {
    const seconds = (message.ended - message.first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const details = usage.prompt_tokens_details ?? {};
    const images = details.image_tokens ?? 0;
    parts.push(`${count(usage.prompt_tokens - images)} text + ${count(images)} image tokens in`);
    if (details.cached_tokens) parts.push(`${count(details.cached_tokens)} cached`);
    parts.push(`${count(usage.completion_tokens)} out`);
  }
  if (message.finish && message.finish !== "stop") parts.push(message.finish === "length" ? "cut at the limit of tokens" : message.finish);
  return parts.join(" · ");
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => {
    button.textContent = "Copy";
  }, 1500);
}
