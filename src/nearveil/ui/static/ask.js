import { get, post } from "./api.js";
import { showGot, showPaid, showSaw } from "./answer.js";
import { curve } from "./curve.js";
import { count, find, make, percent, put, say } from "./dom.js";
import { gauge } from "./gauge.js";
import { chosen, state } from "./state.js";

const STOPS = [0, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12];
const LEAST = 1e-6, MOST = 40;
const LARGEST = 64 * 2 ** 20;

let file = null, map = null, asked = null, busy = false, previewed = 0, looked = 0;

const epsilon = () => Number(find("epsilon-number").value);
const nearestStop = (value) => STOPS.reduce((best, stop, place) => (Math.abs(stop - value) < Math.abs(STOPS[best] - value) ? place : best), 0);
const isProtected = () => chosen()?.kind === "protected";
const isFree = () => find("epsilon-number").value.trim() !== "" && epsilon() === 0;
const valid = () => isFree() || (Number.isFinite(epsilon()) && epsilon() >= LEAST && epsilon() <= MOST);

function showCurve() {
  if (map !== null && valid() && !isFree()) put(find("curve"), curve(map, epsilon(), asked));
}

// A protected gallery is not asked: its model is used here. So there is nothing to pay, and nothing to choose.
function showKind() {
  const kept = isProtected();
  for (const name of ["epsilon-field", "candidates-field", "curve-card"]) find(name).hidden = kept;
  find("ask-button").textContent = kept ? "Classify" : "Ask";
  find("ask-lead").textContent = kept
    ? "Your image stays on this machine. The gallery’s model comes here, and nothing about your image leaves."
    : "Your image stays on this machine. The server is sent the name of one set of its gallery, and nothing else.";
  if (!kept) return;
  find("cost-note").textContent = "This costs nothing.";
  if (asked === null) find("promise").textContent = "Nothing is told about your image, whatever it is.";
}

// At epsilon 0: a copy on this machine, or a sealed question. A copy is never fetched because of an image.
function freeWay() {
  const gallery = chosen(), offers = gallery?.offers ?? [];
  if (gallery?.copy) return `Nothing is sent: the copy of ${count(gallery.copy, "item")} on this machine is searched.`;
  if (offers.includes("sealed")) return "The server is sent noise that it computes on and cannot read.";
  if (offers.includes("codes")) return "There is no copy on this machine yet. Fetch one on the page Gallery, at a time that has nothing to do with an image.";
  return "This gallery hands out no codes and answers no sealed questions: choose an epsilon above 0.";
}

async function preview() {
  const turn = ++previewed;
  if (isProtected()) return showKind();
  if (!valid()) {
    find("epsilon-note").textContent = "Epsilon must be 0, or a number from 0.000001 to 40.";
    find("cost-note").textContent = "";
    return;
  }
  try {
    const told = await get("/api/preview", { epsilon: epsilon() }, 20);
    if (turn !== previewed) return;
    find("epsilon").setAttribute("aria-valuetext", `epsilon ${epsilon()}. ${told.promise}`);
    find("epsilon-note").textContent = isFree() ? `${told.promise} ${freeWay()}` : told.promise;
    find("candidates-field").hidden = isFree();
    if (isFree()) {
      find("cost-note").textContent = "This costs nothing.";
      if (asked === null) find("promise").textContent = told.promise;
      return;
    }
    if (asked === null) find("promise").textContent = told.promise;
    find("cost-note").textContent = told.allowed
      ? `This will cost ${told.cost} of the ${told.before} left.`
      : `This would cost ${told.cost}, and ${told.before} is left: it will be refused.`;
  } catch (trouble) {
    if (turn === previewed) find("cost-note").textContent = trouble.message;
  }
}

function changed() {
  preview();
  showCurve();
}

function showCandidates() {
  const gallery = chosen(), slider = find("candidates");
  const fractions = gallery?.candidates ?? [];
  slider.max = Math.max(fractions.length - 1, 0);
  slider.value = Math.max(fractions.indexOf(state.candidates), 0);
  slider.disabled = fractions.length < 2;
  find("candidates-value").textContent = state.candidates === null ? "" : percent(state.candidates);
  slider.setAttribute("aria-valuetext", state.candidates === null ? "" : `${percent(state.candidates)} of the gallery`);
  if (map === null) return;
  const offered = fractions.length < 2 ? "The gallery has one map, so there is nothing to choose." : `The gallery has maps for ${fractions.map(percent).join(", ")}.`;
  find("candidates-note").textContent = `${map.set_size.toLocaleString("en")} of ${count(map.items, "image")} come back; one of ${count(map.n_sets, "set")} is named. ${map.reach < 1 ? `About ${Math.floor(100 * map.reach)}% of all are in some set; the others never come back.` : "Every one is in some set."} ${offered} This map was learned for epsilon ${map.learned_for}; any other is just as private.`;
}

async function loadMap() {
  const gallery = chosen();
  showKind();
  if (gallery === null || !gallery.published) {
    say(find("ask-error"), gallery ? "This gallery has published nothing yet: its operator must do that." : "");
    return;
  }
  if (isProtected()) {
    looked += 1;
    map = null;
    say(find("ask-error"), "");
    return;
  }
  const turn = ++looked; // of two that are under way, the later one counts
  map = null;
  showCandidates();
  try {
    const told = await get("/api/map", { gallery: gallery.name, candidates: state.candidates }, 90);
    if (turn !== looked) return;
    map = told;
    say(find("ask-error"), "");
  } catch (trouble) {
    if (turn !== looked) return;
    say(find("ask-error"), trouble.message);
  }
  showCandidates();
  changed();
}

// Known without a server.
async function loadAbout() {
  const told = await get("/api/about", {}, 20);
  find("where").textContent = told.where;
  put(find("gauge"), gauge(told.balance));
  find("waiting").hidden = told.waiting.length === 0;
  put(find("waiting-list"), ...told.waiting.map(waits));
}

// The button is the only way back to a question: its image, chosen once more, is a new question.
function waits(one) {
  const time = new Date(1000 * one.asked).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false });
  const again = () => busy || answered("/api/again", { key: one.key }, "", `Your question of ${time}: `);
  return make("li", {}, `Asked at ${time}, epsilon ${one.epsilon}, gallery ${one.gallery}. `, make("button", { type: "button", onclick: again }, "Ask again, for nothing"));
}

export async function loadGalleries() {
  try {
    await loadAbout();
    const told = await get("/api/galleries", {}, 90);
    state.galleries = told.galleries;
    const choice = find("gallery-choice");
    put(choice, ...told.galleries.map((one) => make("option", { value: one.name }, one.kind === "protected" ? `${one.name} (protected: classifies)` : one.name)));
    find("gallery-field").hidden = told.galleries.length < 2;
    if (!chosen()) state.gallery = told.galleries[0].name;
    choice.value = state.gallery;
    if (!chosen().candidates.includes(state.candidates)) state.candidates = chosen().newest;
    say(find("ask-error"), "");
    await loadMap();
  } catch (trouble) {
    const again = make("button", { type: "button", class: "link", onclick: loadGalleries }, "Try again");
    say(find("ask-error"), `${trouble.message} `);
    find("ask-error").append(again);
    showCandidates();
    put(find("curve"), make("p", { class: "note" }, "The curve is drawn from the gallery’s map, which is not here yet."));
    preview();
  }
}

function take(given) {
  if (!given) return;
  const image = find("preview");
  URL.revokeObjectURL(image.src);
  file = given;
  asked = null;
  image.src = URL.createObjectURL(given);
  image.alt = `Your image, ${given.name}`;
  image.hidden = false;
  image.onerror = () => { image.hidden = true; };
  find("drop-label").classList.add("filled");
  put(find("drop-words"), make("span", {}, `${given.name} · choose another`));
  find("answer").hidden = true;
  put(find("paid"));
  say(find("ask-error"), "");
  find("ask-status").textContent = `${given.name} is ready. Nothing was sent yet.`;
  changed();
}

function show(told, which) {
  asked = told;
  showSaw(find("saw"), told);
  showGot(find("got"), told);
  showPaid(find("paid"), told);
  find("promise").textContent = told.promise;
  put(find("gauge"), gauge(told.balance));
  find("answer").hidden = false;
  state.answers += 1;
  if (told.kind === "free") {
    find("ask-status").textContent = `${told.got.length} matches found. It cost nothing.`;
    return;
  }
  if (told.kind === "classified") {
    find("ask-status").textContent = `The most probable class is ${told.label}. It cost nothing.`;
    return;
  }
  find("ask-status").textContent = `${which}${told.got.length} matches found. ${told.repeated ? "It was paid for before." : `It cost ${told.cost}.`} ${told.balance.left_words} of ${told.balance.epsilon} is left.`;
}

// Send something to be answered, show what comes, and say what went wrong.
async function answered(path, told, body, which = "") {
  const error = find("ask-error"), button = find("ask-button");
  busy = true;
  button.disabled = true;
  say(error, "");
  find("ask-status").textContent = "Asking…";
  try {
    show(await post(path, told, body), which);
  } catch (trouble) {
    find("ask-status").textContent = "";
    say(error, trouble.message);
    if (trouble.code === "listing") await loadGalleries().then(() => say(error, trouble.message));
    if (trouble.code === "map_changed") await loadMap().then(() => say(error, trouble.message));
  } finally {
    await loadAbout().catch(() => {});
    busy = false;
    button.disabled = false;
    changed();
  }
}

async function ask(event) {
  event.preventDefault();
  if (busy) return;
  const error = find("ask-error");
  if (file === null) return say(error, "Choose an image first: drop one, or press the field and pick a file.");
  if (!isProtected() && !valid()) return say(error, "Epsilon must be 0, or a number from 0.000001 to 40.");
  if (file.size > LARGEST) return say(error, "This image is too large: at most 64 megapixels and 64 MiB are read. Save a smaller copy. No message was sent, and nothing was paid.");
  if (chosen() === null) return loadGalleries();
  if (isProtected()) return answered("/api/classify", { gallery: state.gallery }, file);
  await answered("/api/ask", { gallery: state.gallery, epsilon: epsilon(), candidates: state.candidates }, file);
}

function listen() {
  const slider = find("epsilon"), number = find("epsilon-number"), drop = find("drop");
  slider.addEventListener("input", () => { number.value = STOPS[slider.value]; changed(); });
  number.addEventListener("input", () => { if (valid()) slider.value = nearestStop(epsilon()); changed(); });
  find("candidates").addEventListener("input", () => { state.candidates = chosen().candidates[find("candidates").value]; find("candidates-value").textContent = percent(state.candidates); });
  find("candidates").addEventListener("change", loadMap);
  find("gallery-choice").addEventListener("change", () => { state.gallery = find("gallery-choice").value; state.candidates = chosen().newest; asked = null; find("answer").hidden = true; put(find("paid")); loadMap(); });
  find("file").addEventListener("change", () => { take(find("file").files[0]); find("file").value = ""; });
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
  // Dropped beside the field, a file would take the place of the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  window.addEventListener("paste", (event) => { if (event.clipboardData?.files.length) take(event.clipboardData.files[0]); });
  find("ask-form").addEventListener("submit", ask);
}

export function start() {
  find("epsilon-number").value = 4;
  find("epsilon").value = STOPS.indexOf(4);
  listen();
  return loadGalleries();
}

export const refresh = () => (state.galleries.length ? preview() : loadGalleries());
