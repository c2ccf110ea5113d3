// Requests to the page's own process, with timeouts. Every failure has a message.

const GONE = "The page's own process does not answer. Check the terminal that runs nearveil ui.";
const SLOW = "The request timed out. Reload the page in a minute: if the query was paid for, it is listed there, and repeating it is free.";

export class PageError extends Error {
  constructor(data) {
    super(data.words);
    Object.assign(this, data);
  }
}

async function request(path, options, seconds) {
  let reply;
  const headers = { ...options.headers, "nearveil-page": sessionStorage.getItem("nearveil-page") ?? "" };
  try {
    reply = await fetch(path, { ...options, headers, credentials: "same-origin", signal: AbortSignal.timeout(seconds * 1000) });
    const data = await reply.json();
    if (reply.ok) return data;
    throw new PageError({ status: reply.status, words: GONE, ...data });
  } catch (error) {
    if (error instanceof PageError) throw error;
    const slow = error.name === "TimeoutError";
    throw new PageError({ code: slow ? "slow" : "gone", words: slow ? SLOW : GONE });
  }
}

function address(path, data = {}) {
  const pairs = Object.entries(data).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return pairs.length ? `${path}?${new URLSearchParams(pairs)}` : path;
}

export const get = (path, data, seconds = 90) => request(address(path, data), {}, seconds);
export const post = (path, data, body, seconds = 180) =>
  request(address(path, data), { method: "POST", body, headers: { "content-type": "application/octet-stream" } }, seconds);
