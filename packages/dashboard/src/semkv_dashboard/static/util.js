// Everything that comes from a server is put in with textContent. No markup is made from text.

const KEY = "semkv-admin-key";
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

export const $ = (id) => document.getElementById(id);
export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export function element(name, className, text, ...inside) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  node.append(...inside);
  return node;
}

// What nobody sees in a text, or takes for something else, is shown by its number: a model reads it.
const UNSEEN = /(?![\n\t])[\p{C}\p{Zl}\p{Zp}\p{Variation_Selector}\p{Default_Ignorable_Code_Point}]|(?! )\p{Zs}/gu;

export function plain(text) {
  return String(text).replace(UNSEEN, (sign) => `[U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

export function bytes(n) {
  let at = 0;
  while (n >= 1024 && at < BYTES.length - 1) { n /= 1024; at += 1; }
  return `${n.toFixed(at && n < 100 ? 1 : 0)} ${BYTES[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "-";
  if (s < 0.1) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 120) return `${s.toFixed(1)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
}

export function age(at) {
  const s = Math.max(0, Date.now() / 1000 - at);
  if (s < 60) return `${Math.round(s)} s ago`;
  if (s < 7200) return `${Math.round(s / 60)} min ago`;
  return s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
}

export const whole = (n) => Math.round(n).toLocaleString("en");
export const percent = (x) => `${(100 * x).toFixed(x > 0 && x < 0.1 ? 2 : 1)}%`;
export const sum = (counts) => Object.values(counts || {}).reduce((a, b) => a + b, 0);
export const money = (amount) => amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: amount < 1 ? 4 : 2 });
export const moment = (at) => new Date(at * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });

export async function call(path, body) {
  const options = { headers: { Authorization: `Bearer ${key.get()}` }, cache: "no-store" };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(`api/${path}`, options);
  const answer = await response.json();
  if (!response.ok) {
    const error = new Error(answer.error ? answer.error.message : response.statusText);
    error.status = response.status;
    throw error;
  }
  return answer;
}

export function row(name, ...numbers) {
  const first = element("td");
  first.append(...(Array.isArray(name) ? name : [name]).map((part) => (typeof part === "string" ? plain(part) : part)));
  return element("tr", "", undefined, first, ...numbers.map((number) => element("td", "number", number)));
}

export function fill(id, rows, empty, columns) {
  const cell = element("td", "empty", empty);
  cell.colSpan = columns;
  $(id).replaceChildren(...(rows.length ? rows : [element("tr", "", undefined, cell)]));
}

let names = {};
export function learnNames(found) { names = found || {}; }
export const nameOf = (tenant) => names[tenant.slice(0, 8)] || "";

// A tenant as people call it, and the digits by which rules and purge name it.
export function tenantCell(tenant) {
  const digits = tenant.slice(0, 8), name = nameOf(tenant);
  if (!digits || digits === "-") return ["all clients"];
  return name ? [name, element("small", "", digits)] : [digits];
}

export function tenantText(tenant) {
  const name = nameOf(tenant);
  if (!tenant) return "all clients";
  return name ? `${plain(name)} (${tenant.slice(0, 8)})` : tenant.slice(0, 8);
}

export function buttons(box, labels, current, choose) {
  if (box.dataset.labels !== labels.join()) {
    box.dataset.labels = labels.join();
    box.replaceChildren(...labels.map((label) => {
      const button = element("button", "", label);
      button.type = "button";
      button.addEventListener("click", () => choose(label));
      return button;
    }));
  }
  for (const button of box.children) button.setAttribute("aria-pressed", button.textContent === current);
}
