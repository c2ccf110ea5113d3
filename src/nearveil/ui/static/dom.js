// Build elements without parsing HTML: text from a server stays text.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const find = (id) => document.getElementById(id);

export function put(target, ...children) {
  target.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

export function say(target, words) {
  target.hidden = !words;
  target.textContent = words || "";
}

// A list of terms and values; a value of null leaves the pair out.
export function facts(pairs, attributes = {}) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined);
  return make("dl", { class: "facts", ...attributes }, ...shown.flatMap(([name, value]) => [
    make("dt", {}, ...(Array.isArray(name) ? name : [name])),
    make("dd", {}, value),
  ]));
}

export const percent = (share) => `${Math.round(100 * share)}%`;
export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
