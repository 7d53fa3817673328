import { $, bytes, element, fill, percent, row, seconds, sum, tenantCell, whole } from "./util.js";

const isHit = (tier) => tier !== "miss" && tier !== "passed";
const NAMES = { exact: "exact repeat", joined: "joined another request", miss: "miss", passed: "passed on" };
const REASONS = {
  new: "nothing stored would do; Requests shows what was nearly a hit",
  sampled: "no temperature 0 and no seed: --default-temperature 0",
  key: "the upstream refused the key",
  store: "the server may keep the response: --stateless-responses",
  route: "not a route that is cached",
  bypass: "the client asked for it",
  tenant: "names a tenant, and is no --trusted-proxy",
  rule: "a --skip-rule of yours",
  fault: "the gateway failed: see its log",
  "no-cache": "the client wants a fresh answer",
  "too-old": "the client wants a newer answer",
  "field that is not known": "--known-field makes it part of the key",
};
let bars = null; // what is drawn, for the pointer

function colors(tiers) {
  const named = tiers.filter(isHit).sort((a, b) => (a === "exact" ? -1 : b === "exact" ? 1 : a.localeCompare(b)));
  const style = getComputedStyle(document.documentElement);
  const out = new Map(named.map((tier, i) => [tier, style.getPropertyValue(`--t${i % 6}`).trim()]));
  for (const tier of ["miss", "passed"]) if (tiers.includes(tier)) out.set(tier, style.getPropertyValue(`--${tier}`).trim());
  return out;
}

function clock(at, window) {
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return window === "7 days" ? `${when.toLocaleDateString([], { weekday: "short", day: "numeric" })} ${time}` : time;
}

function drawChart({ step_s: step, bins: steps, now, tiers, window: name }, palette) {
  const canvas = $("chart");
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = 160, left = 40, foot = 18, top = 8;
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const first = now - (now % step) - step * (steps - 1);
  const filled = new Map(tiers);
  const most = Math.max(1, ...tiers.map(([, counts]) => sum(counts)));
  const wide = (width - left) / steps, tall = height - foot - top;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = style.getPropertyValue("--dim");
  pen.strokeStyle = style.getPropertyValue("--line");
  for (const share of most < 2 ? [0, 1] : [0, 0.5, 1]) {
    const y = top + tall * (1 - share);
    pen.beginPath(); pen.moveTo(left, y + 0.5); pen.lineTo(width, y + 0.5); pen.stroke();
    const value = most * share;
    pen.fillText(value % 1 ? value.toFixed(1) : whole(value), 0, y + 4);
  }
  for (const [at, align, x] of [[0, "left", left], [0.5, "center", left + (width - left) / 2]]) {
    pen.textAlign = align;
    pen.fillText(clock(first + at * step * steps, name), x, height - 3);
  }
  pen.textAlign = "right";
  pen.fillText("now", width, height - 3);
  for (let i = 0; i < steps; i += 1) {
    let y = height - foot;
    const bin = filled.get(first + i * step) || {};
    for (const [tier, color] of palette) {
      const high = ((bin[tier] || 0) / most) * tall;
      pen.fillStyle = color;
      pen.fillRect(left + i * wide, y - high, Math.max(1, wide - 1), high);
      y -= high;
    }
  }
  bars = { first, step, steps, left, wide, filled, name };
}

function point(event) {
  if (!bars) return;
  const i = Math.floor((event.offsetX - bars.left) / bars.wide);
  if (i < 0 || i >= bars.steps) return;
  const at = bars.first + i * bars.step;
  const counts = Object.entries(bars.filled.get(at) || {}).map(([tier, n]) => `${NAMES[tier] || tier} ${whole(n)}`);
  $("pointed").textContent = `${clock(at, bars.name)}: ${counts.join(", ") || "no requests"}`;
}

function byOutcome(sums, kind) {
  const found = new Map();
  for (const [name, counts] of Object.entries(sums)) {
    if (!name.startsWith(`${kind} `)) continue;
    const outcome = name.slice(kind.length + 1);
    for (const [who, n] of Object.entries(counts)) {
      const line = found.get(who) || { all: 0, hit: 0, error: 0 };
      if (outcome === "error") line.error += n; else line.all += n;
      if (outcome === "hit") line.hit += n;
      found.set(who, line);
    }
  }
  return [...found].sort((a, b) => b[1].all + b[1].error - a[1].all - a[1].error);
}

function showSizes(gauges) {
  const rows = [
    ["answers in the store", gauges.response_bytes, gauges.response_limit_bytes, gauges.response_entries],
    ["answers in memory", gauges.memory_bytes, gauges.memory_limit_bytes],
    ["donors, with their images", gauges.media_bytes, gauges.media_limit_bytes, gauges.semantic_entries],
    ["answers on their way", gauges.flight_bytes, gauges.flight_limit_bytes, gauges.flights],
  ];
  $("sizes").replaceChildren(...rows.filter((line) => line[1] !== undefined).map(([name, now, most, entries]) => {
    const meter = element("progress");
    meter.max = most || 1;
    meter.value = most ? now : 0;
    meter.setAttribute("aria-label", name);
    const head = element("dt", "", undefined,
      element("span", "", entries === undefined ? name : `${name} (${whole(entries)})`),
      element("span", "", most ? `${bytes(now)} of ${bytes(most)}` : bytes(now)));
    return element("div", "", undefined, head, element("dd", "", undefined, meter));
  }));
}

export function showOverview(stats) {
  const { traffic, latency, gauges } = stats;
  const tiers = traffic.sums.tier || {};
  const palette = colors(Object.keys(tiers));
  const passed = tiers.passed || 0, all = sum(tiers), asked = all - passed;
  const hits = Object.entries(tiers).filter(([tier]) => isHit(tier));
  const found = hits.reduce((a, [, n]) => a + n, 0);
  const near = hits.filter(([tier]) => tier !== "exact" && tier !== "joined").reduce((a, [, n]) => a + n, 0);
  $("rate").textContent = asked ? percent(found / asked) : "-";
  $("rate-note").textContent = asked ? `${whole(found)} of ${whole(asked)}, ${whole(near)} as near-repeats` : "no request yet";
  const failed = sum(traffic.sums.status);
  $("count-all").textContent = whole(all);
  $("count-note").textContent = `${whole(passed)} passed on, ${whole(failed)} got an error`;
  const { exact: hit = {}, miss = {} } = latency;
  $("latency").textContent = `${seconds(hit.p50)} / ${seconds(miss.p50)}`;
  $("latency-note").textContent = `median; p95 ${seconds(hit.p95)} / ${seconds(miss.p95)}`;
  const checked = gauges.hits_checked || 0;
  $("wrong").textContent = checked ? percent(gauges.wrong_hit_share) : "-";
  $("wrong-note").textContent = checked
    ? `of ${whole(checked)} checked, at most ${percent(gauges.wrong_hit_share_upper)} (95%)`
    : (stats.semantic ? "none was checked yet" : "near-repeats are off");
  drawChart(traffic, palette);
  $("legend").replaceChildren(...[...palette].map(([tier, color]) => {
    const swatch = element("span", "swatch");
    swatch.style.background = color;
    return element("li", "", undefined, swatch, element("span", "", NAMES[tier] || tier));
  }));
  fill("tiers", Object.entries(tiers).map(([tier, n]) => {
    const { p50, p95 } = latency[tier] || {};
    return row(NAMES[tier] ? [NAMES[tier]] : tier, whole(n), percent(n / all), seconds(p50), seconds(p95));
  }), "No requests in this time. Point a client at this gateway.", 5);
  const reasons = Object.entries(traffic.sums.reason || {});
  const unexplained = (tiers.miss || 0) + passed - reasons.reduce((a, [, n]) => a + n, 0);
  if (unexplained > 0) reasons.unshift(["new", unexplained]);
  fill("reasons", reasons.map(([why, n]) =>
    row(REASONS[why] ? [why, element("small", "", REASONS[why])] : why, whole(n))), "Nothing: every request was a hit.", 2);
  for (const kind of ["model", "tenant"]) {
    fill(`${kind}s`, byOutcome(traffic.sums, kind).map(([name, n]) =>
      row(kind === "tenant" ? tenantCell(name) : name, whole(n.all), n.all ? percent(n.hit / n.all) : "-", whole(n.error))),
    "None in this time.", 4);
  }
  showSizes(gauges);
}

$("chart").addEventListener("pointermove", point);
$("chart").addEventListener("pointerleave", () => { $("pointed").textContent = ""; });
