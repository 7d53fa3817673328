"use strict";
// Everything that comes from a server is put in with textContent. No markup is made from text.

const KEY = "semkv-admin-key";
const EVERY_MS = 2000;
const $ = (id) => document.getElementById(id);
const WORTH_ROWS = 14; // days, models or tenants
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
let timer = null;
let asked = null; // the criteria that were counted last
let hits = [];
let wanted = "5 minutes"; // the window that is shown
let latest = null;

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// What nobody sees in a text, or takes for something else, is shown by its number: a model reads it.
const UNSEEN = /(?![\n\t])[\p{C}\p{Zl}\p{Zp}\p{Variation_Selector}\p{Default_Ignorable_Code_Point}]|(?! )\p{Zs}/gu;

function plain(text) {
  return text.replace(UNSEEN, (sign) => `[U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

function bytes(n) {
  let at = 0;
  while (n >= 1024 && at < BYTES.length - 1) { n /= 1024; at += 1; }
  return `${n.toFixed(at && n < 100 ? 1 : 0)} ${BYTES[at]}`;
}

function seconds(s) {
  if (s === null || s === undefined) return "-";
  if (s < 0.1) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 120) return `${s.toFixed(1)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
}

const whole = (n) => Math.round(n).toLocaleString("en");
const percent = (x) => `${(100 * x).toFixed(x > 0 && x < 0.1 ? 2 : 1)}%`;
const isHit = (tier) => tier !== "miss" && tier !== "passed";

async function call(path, body) {
  const options = { headers: { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}` }, cache: "no-store" };
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

// -- figures ---------------------------------------------------------------------------------------------------

function colors(tiers) {
  const named = tiers.filter(isHit).sort((a, b) => (a === "exact" ? -1 : b === "exact" ? 1 : a.localeCompare(b)));
  const style = getComputedStyle(document.documentElement);
  const out = new Map(named.map((tier, i) => [tier, style.getPropertyValue(`--t${i % 6}`).trim()]));
  for (const tier of ["miss", "passed"]) if (tiers.includes(tier)) out.set(tier, style.getPropertyValue(`--${tier}`).trim());
  return out;
}

function drawChart(live, { step_s: per, bins: filled }, palette) {
  const canvas = $("chart");
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = 150, left = 34, foot = 16;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const steps = live.bins, now = Math.floor(Date.now() / 1000 / per);
  const bins = Array.from({ length: steps }, () => new Map());
  for (const [at, tiers] of filled) {
    const bin = Math.min(steps - 1, steps - 1 - now + Math.floor(at / per)); // clocks differ
    if (bin >= 0) for (const [tier, n] of Object.entries(tiers)) bins[bin].set(tier, (bins[bin].get(tier) || 0) + n / per);
  }
  const most = Math.max(1 / per, ...bins.map((bin) => [...bin.values()].reduce((a, b) => a + b, 0)));
  const wide = (width - left) / steps;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = style.getPropertyValue("--dim");
  pen.strokeStyle = style.getPropertyValue("--line");
  for (const share of [0, 0.5, 1]) {
    const y = 6 + (height - foot - 6) * (1 - share);
    pen.beginPath(); pen.moveTo(left, y + 0.5); pen.lineTo(width, y + 0.5); pen.stroke();
    const value = most * share;
    pen.fillText(value < 10 && share ? value.toPrecision(2) : whole(value), 0, y + 4);
  }
  pen.fillText(`${wanted} ago`, left, height - 2);
  pen.textAlign = "right";
  pen.fillText("now", width, height - 2);
  bins.forEach((bin, i) => {
    let y = height - foot;
    for (const [tier, color] of palette) {
      const tall = ((bin.get(tier) || 0) / most) * (height - foot - 6);
      pen.fillStyle = color;
      pen.fillRect(left + i * wide, y - tall, Math.max(1, wide - 1), tall);
      y -= tall;
    }
  });
}

function showRate({ bins }) {
  const sums = new Map();
  for (const [, tiers] of bins) for (const [tier, n] of Object.entries(tiers)) sums.set(tier, (sums.get(tier) || 0) + n);
  let found = 0, approximate = 0, all = 0;
  for (const [tier, n] of sums) {
    if (tier !== "passed") all += n;
    if (isHit(tier)) found += n;
    if (isHit(tier) && tier !== "exact") approximate += n;
  }
  $("rate").textContent = all ? percent(found / all) : "-";
  $("rate-note").textContent = all ? `${whole(found)} of ${whole(all)}, ${whole(approximate)} through a donor` : "no requests";
}

function showSizes(gauges) {
  const rows = [
    ["answers in the store", gauges.response_bytes, gauges.response_limit_bytes, gauges.response_entries],
    ["answers in memory", gauges.memory_bytes, gauges.memory_limit_bytes],
    ["donors, with their images", gauges.media_bytes, gauges.media_limit_bytes, gauges.semantic_entries],
    ["answers on their way", gauges.flight_bytes, gauges.flight_limit_bytes, gauges.flights],
  ];
  $("sizes").replaceChildren(...rows.filter((row) => row[1] !== undefined).map(([name, now, most, entries]) => {
    const box = element("div"), head = element("dt"), bar = element("dd"), meter = element("progress");
    head.append(element("span", "", entries === undefined ? name : `${name} (${whole(entries)})`));
    head.append(element("span", "", most ? `${bytes(now)} of ${bytes(most)}` : bytes(now)));
    meter.max = most || 1;
    meter.value = most ? now : 0;
    meter.setAttribute("aria-label", name);
    bar.append(meter);
    box.append(head, bar);
    return box;
  }));
}

function showWindows(names) {
  for (const node of document.querySelectorAll(".window")) node.textContent = wanted;
  if (!$("windows").children.length) {
    $("windows").append(...names.map((name) => {
      const button = element("button", "", name);
      button.addEventListener("click", () => { wanted = name; showStats(latest); });
      return button;
    }));
  }
  for (const button of $("windows").children) button.setAttribute("aria-pressed", button.textContent === wanted);
}

function row(name, ...numbers) {
  const line = element("tr");
  line.append(element("td", "", name), ...numbers.map((number) => element("td", "number", number)));
  return line;
}

function showStats(stats) {
  latest = stats;
  const { totals, live, gauges } = stats;
  const shown = live.windows[wanted];
  $("advice").textContent = stats.advice;
  $("advice").hidden = !stats.advice;
  const palette = colors([...new Set([...Object.keys(totals.tiers), ...shown.bins.flatMap(([, tiers]) => Object.keys(tiers))])]);
  showWindows(Object.keys(live.windows));
  showRate(shown);
  drawChart(live, shown, palette);
  $("legend").replaceChildren(...[...palette].map(([tier, color]) => {
    const item = element("li"), swatch = element("span", "swatch");
    swatch.style.background = color;
    item.append(swatch, element("span", "", tier));
    return item;
  }));
  const { exact: hit = {}, miss = {} } = live.latency;
  $("latency").textContent = `${seconds(hit.p50)} / ${seconds(miss.p50)}`;
  $("latency-note").textContent = `p95 ${seconds(hit.p95)} / ${seconds(miss.p95)}`;
  $("tokens").textContent = whole(totals.tokens_saved);
  $("seconds").textContent = `${seconds(totals.seconds_saved)} of the upstream's time, ${whole(totals.joins)} requests joined another`;
  const checked = gauges.hits_checked || 0;
  $("wrong").textContent = checked ? percent(gauges.wrong_hit_share) : "-";
  $("wrong-note").textContent = checked
    ? `of ${whole(checked)}, at most ${percent(gauges.wrong_hit_share_upper)} (95%)` : "no hit was checked yet";
  const sum = Object.values(totals.tiers).reduce((a, b) => a + b, 0);
  $("tiers").replaceChildren(...Object.entries(totals.tiers).sort((a, b) => b[1] - a[1]).map(([tier, n]) => {
    const { p50, p95 } = live.latency[tier] || {};
    return row(tier, whole(n), percent(n / sum), seconds(p50), seconds(p95));
  }));
  const reasons = Object.entries(totals.reasons).sort((a, b) => b[1] - a[1]);
  $("reasons").replaceChildren(...(reasons.length ? reasons.map(([why, n]) => row(why, whole(n))) : [row("nothing yet")]));
  const headers = Object.entries(totals.headers).sort((a, b) => b[1] - a[1]);
  $("headers").replaceChildren(...(headers.length ? headers.map(([name, n]) => row(name, whole(n))) : [row("none yet")]));
  for (const kind of ["model", "tenant"]) {
    $(`${kind}s`).replaceChildren(...live.by[kind].map(([name, n]) => {
      const all = Object.values(n).reduce((a, b) => a + b, 0);
      return row(name, whole(all), percent((n.hit || 0) / all));
    }));
  }
  const faults = Object.entries(totals.faults);
  $("faults").textContent = faults.length ? faults.map(([part, n]) => `${part}: ${whole(n)}`).join(", ") : "none";
  $("faults").className = faults.length ? "bad" : "dim";
  showSizes(gauges);
  showWorth(stats.worth);
  showHoldout(totals.holdout);
}

// -- worth -----------------------------------------------------------------------------------------------------

const money = (amount) => amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: amount < 1 ? 4 : 2 });

function showWorth(worth) {
  $("worth").hidden = !worth;
  if (!worth) return;
  const days = Object.values(worth.day);
  const sum = (name) => days.reduce((a, day) => a + day[name], 0);
  $("worth-days").textContent = whole(worth.days);
  const paid = worth.priced
    ? `, which would have cost ${money(sum("money"))}; what was sent upstream cost ${money(sum("sent_money"))}`
    : "; --price says what they would have cost";
  $("worth-sum").textContent = `${whole(sum("requests"))} requests not sent of ${whole(sum("requests") + sum("sent_requests"))}, `
    + `${seconds(sum("gpu_s"))} of GPU time and ${whole(sum("input_tokens") + sum("output_tokens"))} tokens saved${paid}.`;
  $("worth-tiers").replaceChildren(...Object.entries(worth.tiers).map(([tier, n]) => {
    const share = worth.asked[tier];
    const often = share === undefined || share === 1 ? "all" : `1 in ${Math.round(1 / share)}`;
    return row(tier, whole(n.hits), seconds(n.spent_s), seconds(n.saved_s), often);
  }));
  for (const kind of ["day", "model", "tenant"]) {
    $(`worth-${kind}`).replaceChildren(...Object.entries(worth[kind]).slice(0, WORTH_ROWS).map(([name, n]) =>
      row(name || "-", whole(n.requests), seconds(n.gpu_s), worth.priced ? money(n.money) : "-")));
  }
}

function showHoldout({ requests, near, seconds: took, answers }) {
  const held = requests["held out"] || 0, served = requests.served || 0;
  $("holdout").hidden = !held;
  if (!held) return;
  const mean = (group, n) => (n ? seconds(took[group] / n) : "-");
  const compared = (answers.same || 0) + (answers.other || 0);
  $("holdout").textContent = `Held out from near-hits: ${whole(held)} requests, answered after ${mean("held out", held)}; `
    + `the other ${whole(served)} after ${mean("served", served)}. `
    + `Near-hits compared with the request's own answer: ${whole(compared)}, of which ${whole(answers.other || 0)} differ.`;
}

// -- hits ------------------------------------------------------------------------------------------------------

function side(title, parts, others) {
  const box = element("div");
  box.append(element("h3", "", title));
  parts.forEach((part, i) => {
    const same = others.at(i - parts.length)?.text === part.text; // from the end: of long ones the rest is left out
    const role = part.role === "image" ? "text image" : "text";
    const label = part.role === "question" ? "" : `${part.role}: `;
    box.append(element("p", same ? role : `${role} differs`, label + plain(part.text)));
  });
  return box;
}

function hitItem(hit) {
  const item = element("li", "hit"), meta = element("div", "meta");
  meta.append(element("b", "", hit.tier));
  if (hit.score !== null) meta.append(element("span", "", `score ${hit.score.toFixed(3)}`));
  meta.append(element("span", "", new Date(hit.at * 1000).toLocaleTimeString()));
  meta.append(element("span", "", `answer ${seconds(hit.age_s)} old`), element("span", "", hit.model));
  const wrong = element("button", "danger", "This hit was wrong");
  wrong.addEventListener("click", async () => {
    wrong.disabled = true;
    try {
      const { removed } = await call("wrong", { id: hit.id });
      wrong.textContent = removed ? "Removed" : "Gone already";
    } catch (error) {
      wrong.textContent = error.message;
    }
  });
  meta.append(wrong);
  const sides = element("div", "sides");
  sides.append(side("asked", hit.asked, hit.donor), side("answered as", hit.donor, hit.asked));
  const answer = element("div", "answer");
  answer.append(element("h3", "", "answer"), element("p", "text", plain(hit.answer)));
  item.append(meta, sides, answer);
  return item;
}

function showHits() {
  const sought = $("search").value.trim().toLowerCase();
  const text = (hit) => [...hit.asked, ...hit.donor].map((part) => part.text).concat(hit.answer, hit.model, hit.tenant).join("\n");
  const shown = hits.filter((hit) => (!$("only").checked || hit.tier !== "exact") && text(hit).toLowerCase().includes(sought)).slice(0, 50);
  const list = $("hits");
  const known = new Map([...list.children].map((node) => [node.dataset.id, node]));
  list.replaceChildren(...shown.map((hit) => {
    const node = known.get(hit.id) || hitItem(hit); // a button's state outlives the next refresh
    node.dataset.id = hit.id;
    return node;
  }));
  $("nohits").textContent = sought ? "None of the latest hits has this." : "None yet.";
  $("nohits").hidden = shown.length > 0;
}

// -- invalidation ----------------------------------------------------------------------------------------------

function criteria() {
  return Object.fromEntries([...new FormData($("invalidate"))].filter(([, value]) => value.trim() !== ""));
}

function say(text, bad) {
  $("counted").textContent = text;
  $("counted").className = bad ? "bad" : "";
}

async function count(event) {
  event.preventDefault();
  const wanted = criteria();
  $("remove").disabled = true;
  asked = null;
  try {
    const { count: n } = await call("invalidate", { ...wanted, dry_run: true });
    say(n === 1 ? "1 answer would be removed." : `${whole(n)} answers would be removed.`);
    asked = n ? wanted : null;
    $("remove").disabled = !n;
  } catch (error) {
    say(error.message, true);
  }
}

async function remove() {
  if (!asked) return;
  $("remove").disabled = true;
  try {
    const { count: n } = await call("invalidate", { ...asked, dry_run: false });
    say(n === 1 ? "1 answer was removed." : `${whole(n)} answers were removed.`);
  } catch (error) {
    say(error.message, true);
  }
  asked = null;
}

// -- in and out ------------------------------------------------------------------------------------------------

async function refresh() {
  try {
    const [stats, recent] = await Promise.all([call("stats"), call("hits")]);
    hits = recent.hits;
    $("door").hidden = true;
    $("board").hidden = false;
    $("leave").hidden = false;
    const away = stats.gauges.store_up === 0;
    const refuses = !away && stats.gauges.store_writable === 0;
    const waiting = (stats.gauges.unwritten_entries || 0).toLocaleString();
    $("state").textContent = `version ${stats.version}, ${stats.workers > 1 ? `${stats.workers} workers, ` : ""}refreshed ${new Date().toLocaleTimeString()}`
      + (away ? ", the store is away: answers come from memory alone" : "")
      + (refuses ? `, the store takes no new answers (/readyz says why): ${waiting} are in memory alone` : "");
    if (stats.gauges.salt_refused) $("state").textContent += ", the upstream refuses cache_salt: tenants share its prefix cache";
    const down = stats.upstreams.filter((upstream) => !upstream.up);
    if (stats.upstreams.length > 1 || down.length) $("state").textContent += `, upstreams: ${stats.upstreams.map((upstream) => `${upstream.name} ${upstream.up ? `(${whole(upstream.running)} running)` : "does not answer"}`).join(", ")}`;
    $("state").className = away || refuses || down.length || stats.gauges.salt_refused ? "bad" : "";
    showStats(stats);
    showHits();
    return true;
  } catch (error) {
    if (error.status === 401 || error.status === 403) leave(error.message);
    else $("state").textContent = `no answer: ${error.message}`;
    return false;
  }
}

async function start() {
  if (timer !== null) clearInterval(timer);
  timer = (await refresh()) ? setInterval(refresh, EVERY_MS) : null;
}

function leave(reason) {
  sessionStorage.removeItem(KEY);
  if (timer !== null) clearInterval(timer);
  timer = null;
  $("board").hidden = true;
  $("leave").hidden = true;
  $("door").hidden = false;
  $("state").textContent = "not connected";
  $("refused").textContent = reason || "";
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  start();
});
$("leave").addEventListener("click", () => leave(""));
$("invalidate").addEventListener("submit", count);
$("invalidate").addEventListener("input", () => { $("remove").disabled = true; asked = null; });
$("remove").addEventListener("click", remove);
$("only").addEventListener("change", showHits);
$("search").addEventListener("input", showHits);
if (sessionStorage.getItem(KEY)) start();
