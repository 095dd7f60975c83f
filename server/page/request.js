// A conversation as a request to /v1/chat/completions, as a command and as a program.

import { at } from "./dom.js";
import { address } from "./api.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** An option that cannot be read; the message says which. */
export class OptionError extends Error {}

/**
 * The options as fields of a request.
 * @throws {OptionError}
 */
export function options() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = at(name);
    if (input.value === "" && !input.validity.badInput) continue;
    if (!input.checkValidity()) throw new OptionError(`${input.labels[0].firstChild.textContent.trim()}: ${input.validationMessage}`);
    fields[name] = Number(input.value);
  }
  const schema = at("schema").value.trim();
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema) } };
  return fields;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new OptionError(`The schema is not JSON: ${error.message}`);
  }
}

/** The body of a request for the next answer. */
export function body(messages, model) {
  const sent = [];
  const system = at("system").value.trim();
  if (system) sent.push({ role: "system", content: system });
  for (const message of messages) {
    if (message.failed) continue;
    const images = (message.images ?? []).map((p) => ({ type: "image_url", image_url: { url: p.url } }));
    const content = images.length ? [...images, { type: "text", text: message.text }] : message.text;
    sent.push({ role: message.role, content });
  }
  return { model, messages: sent, ...options() };
}

/** The body as people read it: long data URLs are cut. */
function readable(request) {
  return JSON.stringify(request, (_, value) => (typeof value === "string" && value.startsWith("data:") && value.length > 120 ? `${value.slice(0, 60)}...` : value), 2);
}

/** The request as a shell command. */
export function curl(request, guarded) {
  const key = guarded ? ' \\\n  -H "Authorization: Bearer $TRENCADIS_API_KEY"' : "";
  const data = readable(request).replaceAll("'", "'\\''");
  return `curl ${address("/v1/chat/completions")} \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${data}'`;
}

/** The request as a Python program with OpenAI's client. */
export function python(request, guarded) {
  const key = guarded ? 'os.environ["TRENCADIS_API_KEY"]' : '"none"';
  return [
    "import json",
    ...(guarded ? ["import os"] : []),
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address("/v1"))}, api_key=${key})`,
    `request = json.loads(r'''`,
    readable(request).replaceAll("'''", "\\u0027\\u0027\\u0027"),
    "''')",
    "answer = client.chat.completions.create(**request)",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}
