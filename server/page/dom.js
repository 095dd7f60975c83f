// Elements and texts. All text becomes text nodes; nothing here parses HTML.

/** The element with an id, which must exist. */
export function at(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element #${id}`);
  return found;
}

/**
 * Makes an element.
 * @param {string} name its tag
 * @param {object} set properties; `on` maps events to handlers, `attributes` are set as such
 * @param {...(Node|string)} children
 */
export function make(name, set = {}, ...children) {
  const { on = {}, attributes = {}, ...properties } = set;
  const element = Object.assign(document.createElement(name), properties);
  for (const [event, handler] of Object.entries(on)) element.addEventListener(event, handler);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[^\n`]*$/;

/** A text as elements: fenced code in `pre`, the rest in paragraphs that keep their line ends. */
export function written(text) {
  const parts = [];
  let lines = [];
  let fence = "";
  const close = (kind) => {
    const body = lines.join("\n");
    if (kind === "pre" || body.trim()) parts.push(make(kind, kind === "p" ? { className: "text" } : { tabIndex: 0 }, body));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const found = FENCE.exec(line);
    if (!fence && found) {
      close("p");
      fence = found[1];
    } else if (fence && line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "")) {
      close("pre");
      fence = "";
    } else {
      lines.push(line);
    }
  }
  close(fence ? "pre" : "p");
  return parts;
}

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** Bytes with a unit. */
export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit ? count.toFixed(count < 10 ? 2 : 1) : count} ${UNITS[unit]}`;
}

/** A number with thin separators. */
export function count(value) {
  return new Intl.NumberFormat("en").format(value);
}

/** Opens a dialog and waits for it; its buttons marked data-close cancel it. */
export function shown(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}
