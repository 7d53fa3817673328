import { $, element, fill, money, percent, row, seconds, tenantCell, whole } from "./util.js";

const ROWS = 31; // days, models or tenants

function showHoldout({ requests, near, seconds: took, answers }) {
  const held = requests["held out"] || 0, served = requests.served || 0;
  if (!held) {
    $("holdout").textContent = "To measure near-hits against none while they run, start with --holdout 0.01.";
    return;
  }
  const mean = (group, n) => (n ? seconds(took[group] / n) : "-");
  const compared = (answers.same || 0) + (answers.other || 0);
  $("holdout").textContent = `Held out from near-hits: ${whole(held)} requests, answered after ${mean("held out", held)}; `
    + `the other ${whole(served)} after ${mean("served", served)}. `
    + `Near-hits compared with the request's own answer: ${whole(compared)}, of which ${whole(answers.other || 0)} differ.`;
}

function line(cell, n, priced) {
  return row(cell, whole(n.requests), whole(n.requests + n.sent_requests), seconds(n.gpu_s), priced ? money(n.money) : "-");
}

export function showWorth(stats) {
  const { worth, totals } = stats;
  $("no-worth").hidden = Boolean(worth);
  $("worth-body").hidden = !worth;
  if (!worth) return;
  const days = Object.values(worth.day);
  const sum = (name) => days.reduce((a, day) => a + day[name], 0);
  const saved = sum("requests"), all = saved + sum("sent_requests");
  $("worth-requests").textContent = whole(saved);
  $("worth-requests-note").textContent = all ? `of ${whole(all)}, ${percent(saved / all)}` : "nothing was asked yet";
  $("worth-money").textContent = worth.priced ? money(sum("money")) : "-";
  $("worth-money-note").textContent = worth.priced
    ? `what was sent cost ${money(sum("sent_money"))}` : "--price 'MODEL=input=0.15 output=0.60' says what tokens cost";
  $("worth-gpu").textContent = seconds(sum("gpu_s"));
  $("worth-gpu-note").textContent = `${seconds(sum("upstream_s"))} of waiting for the upstream`;
  $("worth-tokens").textContent = whole(sum("input_tokens") + sum("output_tokens"));
  $("worth-tokens-note").textContent = `${whole(sum("input_tokens"))} in, ${whole(sum("output_tokens"))} out`;
  fill("worth-tiers", Object.entries(worth.tiers).map(([tier, n]) => {
    const share = worth.asked[tier];
    const often = share === undefined || share === 1 ? "all" : `1 in ${Math.round(1 / share)}`;
    return row(tier, whole(n.hits), seconds(n.spent_s), seconds(n.saved_s), often);
  }), "No lookup yet.", 5);
  for (const kind of ["day", "model", "tenant"]) {
    const rows = Object.entries(worth[kind]).slice(0, ROWS);
    fill(`worth-${kind}`, rows.map(([name, n]) => line(kind === "tenant" && name !== "others" ? tenantCell(name) : name || "-", n, worth.priced)),
      "Nothing yet: what hits save is counted from the first miss on.", 5);
  }
  showHoldout(totals.holdout);
}
