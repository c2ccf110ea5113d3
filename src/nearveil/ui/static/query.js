import { find, make, put } from "./dom.js";
import { nameOf, portray } from "./viewer.js";

// The private query: a dropped file, or an item of a local gallery.

let receive = () => {}, itemReceiver = () => {};

function showImage(source, name) {
  const image = find("preview");
  if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  image.hidden = !source;
  if (!source) image.removeAttribute("src");
  else image.src = source;
  image.alt = `Your query, ${name}`;
  image.onerror = () => { image.hidden = true; };
  find("drop-label").classList.add("filled");
  put(find("drop-words"), make("span", {}, `${name} · choose another`));
}

export function clearQuery() {
  find("preview").hidden = true;
  find("drop-label").classList.remove("filled");
}

function takeFile(file) {
  if (!file) return;
  find("item-id").value = "";
  showImage(file.name.endsWith(".npy") ? "" : URL.createObjectURL(file), file.name);
  receive(file);
}

// Show the fields for a gallery; with an item, show that as the query.
export function showQuery(gallery, { take, takeId }, item = null) {
  [receive, itemReceiver] = [take, takeId];
  const images = gallery?.takes_images ?? true, local = gallery?.is_local ?? false;
  find("item-field").hidden = images || !local;
  find("drop").hidden = !images && local;
  find("file").accept = images ? "image/jpeg,image/png,image/webp,image/gif,image/bmp,image/tiff,image/heic,image/heif" : ".npy";
  find("file-note").textContent = images ? "JPEG, PNG, WebP, GIF, BMP, TIFF or HEIC. It is never saved to disk." : `One vector of ${gallery.dimension} numbers, in a .npy file. It is never saved to disk.`;
  if (item === null) {
    if (!find("drop-label").classList.contains("filled")) put(find("drop-words"), make("strong", {}, images ? "Drop an image here" : "Drop a vector here"), make("br"), "or choose a file");
  } else if (images) {
    const picture = portray(item);
    showImage(picture?.src ?? "", nameOf(item));
    if (picture) picture.onload = () => { find("preview").src = picture.src; };
  } else {
    find("item-id").value = nameOf(item);
  }
}

// Show items of a local gallery from which a search can start: below the page, or below the field for their ids.
export function showExamples(items, search) {
  const below = !find("item-field").hidden;
  find("item-examples").hidden = !below || items.length === 0;
  find("examples").hidden = below || items.length === 0;
  put(find(below ? "item-list" : "examples-list"), ...items.map((item) => {
    const picture = portray(item, 200), name = nameOf(item);
    return make("li", {}, make("button", { type: "button", class: picture ? "tile" : "chip", title: name, "aria-label": `Search from ${name}`, onclick: () => search(item) }, picture ?? name));
  }));
}

export function listen() {
  const drop = find("drop"), file = find("file");
  file.addEventListener("change", () => { takeFile(file.files[0]); file.value = ""; });
  find("item-id").addEventListener("input", () => itemReceiver(find("item-id").value.trim()));
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); takeFile(event.dataTransfer.files[0]); });
  // A file dropped outside the field would replace the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  window.addEventListener("paste", (event) => { if (event.clipboardData?.files.length) takeFile(event.clipboardData.files[0]); });
}
