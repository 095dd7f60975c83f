// A image as the model sees it: resized, in windows of 112 x 112 pixels. Windows at the edges hold fewer patches.

import { make } from "./dom.js";

export const WINDOW = 112;
const PATCHES = 8; // a side of a window
const SLOTS = PATCHES * PATCHES;

/**
 * The windows of one image.
 * @param {{width: number, height: number, grid: number[]}} size as `return_image_sizes` gives it
 * @returns {{x: number, y: number, width: number, height: number, edge: boolean}[]} in pixels, row by row
 */
export function windows(size) {
  const found = [];
  for (let y = 0; y < size.height; y += WINDOW) {
    for (let x = 0; x < size.width; x += WINDOW) {
      const width = Math.min(WINDOW, size.width - x);
      const height = Math.min(WINDOW, size.height - y);
      found.push({ x, y, width, height, edge: width < WINDOW || height < WINDOW });
    }
  }
  return found;
}

/** VISION slots that a image takes: 64 for each window, whether it is full or not. */
export function slots(size) {
  const [t, h, w] = size.grid;
  return t * Math.ceil(h / PATCHES) * Math.ceil(w / PATCHES) * SLOTS;
}

/** The smallest planned VISION bucket that holds a image alone; null where shapes are not planned. */
export function bucket(size, planned) {
  const need = slots(size);
  const fitting = (planned ?? []).filter((b) => b.planned && b.stage === "vision" && b.dims[0] >= need);
  return fitting.sort((a, b) => a.dims[0] - b.dims[0])[0] ?? null;
}

/** What there is to say about a image, for the caption and for screen readers. */
export function described(size, planned) {
  const parts = windows(size);
  const edge = parts.filter((part) => part.edge).length;
  const alone = bucket(size, planned);
  const words = [
    `${size.original_width} × ${size.original_height} resized to ${size.width} × ${size.height}`,
    `${parts.length} ${parts.length === 1 ? "window" : "windows"} of ${WINDOW} px${edge ? ` (${edge} cut by the edge)` : ""}`,
    `${size.tokens} tokens`,
    `${slots(size)} slots`,
  ];
  if (alone) words.push(`bucket ${alone.bucket} (${alone.state})`);
  return words.join(" · ");
}

/**
 * Draws a image with its windows.
 * @param {CanvasImageSource} image
 * @param {object|null} size null: not known yet, so no windows are drawn
 * @param {number} most the canvas's longest side
 */
export function drawn(image, size, most) {
  const natural = { width: image.width, height: image.height };
  const { width, height } = size ?? natural;
  const scale = Math.min(1, most / Math.max(width, height));
  const canvas = make("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  if (!size) return canvas;
  for (const part of windows(size)) {
    const [x, y, w, h] = [part.x, part.y, part.width, part.height].map((v) => v * scale);
    if (part.edge) {
      pen.fillStyle = "rgba(224, 122, 63, .28)";
      pen.fillRect(x, y, w, h);
    }
    pen.strokeStyle = "rgba(255, 255, 255, .9)";
    pen.lineWidth = 2;
    pen.strokeRect(x, y, w, h);
    pen.strokeStyle = "rgba(20, 40, 48, .9)";
    pen.lineWidth = 1;
    pen.strokeRect(x, y, w, h);
  }
  return canvas;
}

/** A figure of a image, with what the model sees of it. */
export function figure(image, planned, most = 320) {
  const caption = image.size ? described(image.size, planned) : image.note ?? "measuring…";
  const canvas = drawn(image.bitmap, image.size, most);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${image.name}: ${caption}`);
  return make("figure", { className: "image" }, canvas, make("figcaption", {}, caption));
}
