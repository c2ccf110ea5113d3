import { make } from "./dom.js";

// The spent part of an account, as a bar.
export function gauge(balance) {
  const share = balance.epsilon > 0 ? balance.left / balance.epsilon : 0;
  const fill = make("span", { class: share < 0.15 ? "fill low" : "fill" });
  fill.style.width = `${100 * (1 - share)}%`;
  const track = make(
    "div",
    {
      class: "track",
      role: "meter",
      "aria-label": `Budget of the account ${balance.account}`,
      "aria-valuemin": 0,
      "aria-valuemax": balance.epsilon,
      "aria-valuenow": balance.left,
      "aria-valuetext": `${balance.left_words} of ${balance.epsilon} left`,
    },
    fill,
  );
  const left = make("span", {}, make("strong", {}, balance.left_words), ` of ${balance.epsilon} left`);
  return make("div", { class: "gauge" }, track, make("p", {}, make("span", {}, `${balance.spent_words} spent`), left));
}
