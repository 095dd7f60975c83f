// Requests to the server that this page came from: key, errors in the API's words, streams.

const KEY = "trencadis-key";

/** An error as the API tells it. `retry` is the seconds after which it asks to be tried again, if it does. */
export class ApiError extends Error {
  constructor(status, message, retry) {
    super(message);
    this.status = status;
    this.retry = retry;
  }
}

let askForKey = async () => null;

/** Sets what asks the user for a key; it returns null if there is none. */
export function onUnauthorized(ask) {
  askForKey = ask;
}

/** The address of an API path, below the prefix that the page is served under. */
export function address(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI).href;
}

export function key() {
  return sessionStorage.getItem(KEY);
}

/**
 * Sends a request; asks for a key and tries again where the server wants one.
 * @param {string} path such as "/v1/models"
 * @param {{body?: object, signal?: AbortSignal, quiet?: boolean}} options quiet: never ask for a key
 * @returns {Promise<Response>} a response with a status below 400
 * @throws {ApiError}
 */
export async function send(path, options = {}) {
  const used = key();
  const headers = {};
  if (used) headers["authorization"] = `Bearer ${used}`;
  if (options.body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method: options.body ? "POST" : "GET",
      headers,
      body: options.body ? JSON.stringify(options.body) : undefined,
      signal: options.signal,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.", 3);
  }
  if (response.status < 400) return response;
  if (response.status === 401 && !options.quiet) {
    const given = key() !== used ? key() : await askForKey(used !== null);
    if (given) {
      sessionStorage.setItem(KEY, given);
      return send(path, options);
    }
  }
  throw await problem(response);
}

/** Like `send`; returns the parsed JSON. */
export async function json(path, options) {
  return (await send(path, options)).json();
}

async function problem(response) {
  let message = `${response.status} ${response.statusText}`.trim();
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
  } catch {
    // A proxy's page, or nothing: the status says what there is to say.
  }
  const after = Number(response.headers.get("retry-after"));
  return new ApiError(response.status, message, after > 0 ? after : undefined);
}

/**
 * The events of a stream, parsed.
 * @throws {ApiError} the server reports an error within the stream, or the stream breaks off
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The answer broke off: the connection was closed.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message ?? "The server failed.");
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
