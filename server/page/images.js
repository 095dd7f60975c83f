// Images on their way into a message: dropped, pasted, chosen, or taken with the camera.

import { json } from "./api.js";
import { at, make, shown } from "./dom.js";
import { figure } from "./mosaic.js";

/**
 * The images of the next message.
 * Each is {name, url, bitmap, size, note}: a data URL, its pixels, and what /tokenize says of it once it has answered.
 */
export class Images {
  /** @param {{changed: () => void, fault: (text: string) => void, buckets: () => object[], model: () => string}} page */
  constructor(page) {
    this.page = page;
    this.list = [];
    this.listen();
  }

  listen() {
    const file = at("file");
    at("attach").addEventListener("click", () => file.click());
    at("camera").addEventListener("click", () => this.shoot());
    file.addEventListener("change", async () => {
      await this.add([...file.files]);
      file.value = "";
    });
    const composer = at("composer");
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      composer.classList.add("over");
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) composer.classList.remove("over");
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      composer.classList.remove("over");
      this.add([...event.dataTransfer.files]);
    });
    document.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length) {
        event.preventDefault();
        this.add(files);
      }
    });
  }

  /** Takes files; those that are no images are named in the fault line. */
  async add(files) {
    if (at("attach").hidden) {
      this.page.fault("This model takes no images.");
      return;
    }
    for (const file of files) {
      try {
        const [url, bitmap] = await Promise.all([dataUrl(file), createImageBitmap(file)]);
        const image = { name: file.name || "image", url, bitmap, size: null, note: null };
        this.list.push(image);
        this.show();
        this.measure(image);
      } catch {
        this.page.fault(`${file.name || "The file"} is no image that this browser can read.`);
      }
    }
  }

  /** Asks the server how the model will see a image. */
  async measure(image) {
    const content = [{ type: "image_url", image_url: { url: image.url } }];
    const body = { model: this.page.model(), messages: [{ role: "user", content }], return_image_sizes: true };
    try {
      const told = await json("/tokenize", { body });
      if (told.count > told.max_model_len) throw new Error(`${told.count} tokens; the model reads ${told.max_model_len}`);
      image.size = told.images?.[0] ?? null;
      image.note = image.size ? null : "";
    } catch (error) {
      image.note = error.message;
    }
    this.show();
  }

  /** Takes one image with the camera. */
  async shoot() {
    const video = at("viewfinder");
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch {
      this.page.fault("There is no camera that this page may use.");
      return;
    }
    video.srcObject = stream;
    const shoot = at("shoot");
    const dialog = at("camera-dialog");
    const click = async () => {
      const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
      canvas.getContext("2d").drawImage(video, 0, 0);
      const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
      dialog.close("taken");
      await this.add([new File([blob], "camera.jpg", { type: "image/jpeg" })]);
    };
    shoot.addEventListener("click", click);
    await shown(dialog);
    shoot.removeEventListener("click", click);
    for (const track of stream.getTracks()) track.stop();
    video.srcObject = null;
  }

  /** The images for a message that is sent now; the next one starts without any. */
  take() {
    const taken = this.list;
    this.list = [];
    this.show();
    return taken;
  }

  /** Puts images of an earlier message back. */
  put(images) {
    this.list = [...images];
    this.show();
  }

  show() {
    const items = this.list.map((image) => {
      const remove = make("button", { type: "button", on: { click: () => this.remove(image) } }, "Remove");
      remove.setAttribute("aria-label", `Remove ${image.name}`);
      const shown = figure(image, this.page.buckets(), 180);
      shown.append(remove);
      return make("li", {}, shown);
    });
    at("attached").replaceChildren(...items);
    this.page.changed();
  }

  remove(image) {
    this.list = this.list.filter((one) => one !== image);
    this.show();
    at("draft").focus();
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
