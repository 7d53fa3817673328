import { $, buttons, call, key, learnNames, whole } from "./util.js";
import { showOverview } from "./overview.js";
import { showWorth } from "./worth.js";
import { find } from "./entries.js";
import { readRequests, seek } from "./requests.js";
import { showFaults } from "./faults.js";

const EVERY_MS = 2000;
const PAGES = ["overview", "worth", "entries", "requests", "faults"];
const DAYS = { today: 1, "7 days": 7, "30 days": 30, "90 days": 90 };
let timer = null;
let windowName = "1 hour";
let days = "30 days";
let latest = null;

function current() {
  const [name, rest] = location.hash.slice(1).split("?");
  return { page: PAGES.includes(name) ? name : "overview", asked: new URLSearchParams(rest || "") };
}

function showTrouble(stats) {
  const troubles = [];
  const waiting = whole(stats.gauges.unwritten_entries || 0);
  if (stats.store === "away") troubles.push("the store is away: answers come from memory alone");
  else if (stats.store !== "up") troubles.push(`the store takes no new answers (${stats.store}): ${waiting} are in memory alone`);
  if (stats.gauges.salt_refused) troubles.push("the upstream refuses cache_salt: tenants share its prefix cache");
  for (const upstream of stats.upstreams.filter((one) => !one.up)) troubles.push(`the upstream ${upstream.name} does not answer and is left out`);
  $("trouble").textContent = troubles.join("; ");
  $("trouble").hidden = !troubles.length;
  $("advice").textContent = stats.advice;
  $("advice").hidden = !stats.advice;
  const workers = stats.workers > 1 ? `, ${stats.workers} workers` : "";
  $("state").textContent = `version ${stats.version}${workers}, ${new Date().toLocaleTimeString()}`;
  $("state").className = "";
}

function showPage() {
  const { page } = current();
  for (const name of PAGES) $(name).hidden = name !== page;
  for (const link of $("nav").children) {
    if (link.hash === `#${page}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (!latest) return;
  for (const box of document.querySelectorAll(".windows")) {
    buttons(box, latest.traffic.windows, windowName, (name) => { windowName = name; refresh(); });
  }
  buttons($("days"), Object.keys(DAYS), days, (name) => { days = name; refresh(); });
  if (page === "overview") showOverview(latest);
  if (page === "worth") showWorth(latest);
  if (page === "faults") showFaults(latest);
}

async function refresh() {
  try {
    latest = await call(`stats?window=${encodeURIComponent(windowName)}&days=${DAYS[days]}`);
    if (current().page === "requests") await readRequests(latest.workers);
    learnNames(latest.names);
    $("door").hidden = true;
    for (const id of ["board", "nav", "leave"]) $(id).hidden = false;
    showTrouble(latest);
    showPage();
    return true;
  } catch (error) {
    if (error.status === 401 || error.status === 403 || (error.status === 429 && !latest)) leave(error.message);
    else {
      $("state").textContent = `no answer: ${error.message}`;
      $("state").className = "bad";
    }
    return false;
  }
}

async function arrive() {
  const { page, asked } = current();
  showPage();
  window.scrollTo(0, 0);
  if (!latest) return;
  if (page === "entries") await find();
  if (page === "requests") {
    await readRequests(latest.workers);
    if (asked.has("id")) seek(asked.get("id"));
  }
}

async function start() {
  if (timer !== null) clearInterval(timer);
  timer = (await refresh()) ? setInterval(() => { if (!document.hidden) refresh(); }, EVERY_MS) : null;
  if (timer !== null) await arrive();
}

function leave(reason) {
  key.forget();
  if (timer !== null) clearInterval(timer);
  timer = null;
  latest = null;
  for (const id of ["board", "nav", "leave"]) $(id).hidden = true;
  $("door").hidden = false;
  $("state").textContent = "not connected";
  $("state").className = "";
  $("refused").textContent = reason || "";
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value);
  $("key").value = "";
  start();
});
$("leave").addEventListener("click", () => leave(""));
window.addEventListener("hashchange", arrive);
window.addEventListener("resize", showPage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showPage);
if (key.get()) start();
