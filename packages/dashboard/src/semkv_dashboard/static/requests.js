import { $, buttons, call, element, moment, plain, seconds, tenantText } from "./util.js";

const STEP = 20; // rows that are shown, and that one press adds
const KINDS = { near: "Nearly hits", misses: "Misses", approximate: "Near-repeats served", exact: "Exact hits" };
const NOTES = {
  near: "These found a similar question that was not used. Where it lay below the threshold and no guard objects, a lower --similarity-threshold would have used it.",
  misses: "These went to the upstream. A request is found by the X-Request-Id of its answer.",
  approximate: "These were answered with the answer to another question. Call one wrong, and the pair is not used again.",
  exact: "These were asked before in the same words.",
};
const NONE = {
  near: "None yet. Near-misses appear once a question comes that is similar to a stored one, and near-repeats are on.",
  misses: "None yet.",
  approximate: "None yet. Near-repeats need an encoder: start without --no-semantic.",
  exact: "None yet. The second of two equal requests is one.",
};
const LABELS = Object.values(KINDS);
let rows = { hits: [], near: [], misses: [] };
let kind = "near";
let most = STEP;

// The words that the other text does not have.
function marked(text, other) {
  const words = new Set(other.toLowerCase().match(/[\p{L}\p{N}]+/gu));
  return text.split(/([\p{L}\p{N}]+)/u).map((piece, i) => (i % 2 && !words.has(piece.toLowerCase()) ? element("mark", "", piece) : piece));
}

function side(title, parts, others) {
  const box = element("div", "", undefined, element("h4", "", title));
  parts.forEach((part, i) => {
    const same = others.at(i - parts.length)?.text === part.text; // from the end: of long ones the rest is left out
    const label = part.role === "question" ? "" : `${part.role}: `;
    const other = others.at(i - parts.length)?.text ?? "";
    const text = element("p", part.role === "image" ? "text image" : "text", label);
    text.append(...(same ? [plain(part.text)] : marked(plain(part.text), plain(other))));
    box.append(text);
  });
  return box;
}

function hitItem(hit) {
  const meta = element("div", "meta", undefined, element("b", "", hit.tier));
  if (hit.score !== null) meta.append(element("span", "", `score ${hit.score.toFixed(3)}`));
  for (const fact of [moment(hit.at), `answer ${seconds(hit.age_s)} old`, hit.model, tenantText(hit.tenant), `request ${hit.request_id}`]) {
    meta.append(element("span", "", plain(fact)));
  }
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
  const question = hit.asked.at(-1)?.text === hit.donor.at(-1)?.text && hit.asked.length === 1;
  const texts = question ? [side("asked", hit.asked, hit.asked)] : [side("asked", hit.asked, hit.donor), side("answered as", hit.donor, hit.asked)];
  return element("li", "item hit", undefined, meta, element("div", question ? "" : "sides", undefined, ...texts),
    element("div", "answer", undefined, element("h4", "", "answer"), element("p", "text", plain(hit.answer))));
}

function because(miss) {
  if (miss.near) {
    const { tier, score, reason, guard } = miss.near;
    const too = guard && !reason.startsWith("veto:") ? `, and a guard would refuse it: ${guard}` : "";
    return `${tier.replace("_", " ")} ${score.toFixed(3)}: ${reason.replace("veto:", "a guard refused it: ")}${too}`;
  }
  if (miss.status >= 400) return `the answer was an error, ${miss.status}`;
  if (!miss.status) return "the client hung up";
  if (miss.reason) return miss.reason;
  return miss.unkept ? "nothing like it was stored" : "nothing like it was stored; its answer is now";
}

function missItem(miss) {
  const meta = element("div", "meta", undefined, element("b", "", miss.kind));
  for (const fact of [moment(miss.at), miss.route, miss.model, tenantText(miss.tenant), `status ${miss.status || "none"}`, seconds(miss.seconds),
    `request ${miss.upstream_id || miss.request_id}`]) if (fact) meta.append(element("span", "", plain(fact)));
  const why = element("p", "why", undefined, element("b", "", plain(because(miss))));
  if (miss.unkept) why.append(` - its answer was not kept: ${plain(miss.unkept)}`);
  const node = element("li", "item miss", undefined, meta, why);
  if (miss.near) {
    const texts = [miss.near.asked, miss.near.donor].map((text) => [{ role: "question", text }]);
    node.append(element("div", "sides", undefined, side("asked", texts[0], texts[1]), side("nearly answered as", texts[1], texts[0])));
  } else if (miss.prompt) node.append(element("p", "text", plain(miss.prompt)));
  return node;
}

const idOf = (entry) => `${entry.id || ""} ${entry.request_id} ${entry.at}`;

function textOf(entry) {
  const sides = entry.asked ? [...entry.asked, ...entry.donor].map((part) => part.text) : [entry.near?.asked, entry.near?.donor, entry.prompt];
  return [...sides, entry.answer, entry.model, tenantText(entry.tenant), entry.request_id, entry.upstream_id, entry.reason, entry.near?.reason, entry.id]
    .filter(Boolean).join("\n").toLowerCase();
}

function ofKind(name) {
  if (name === "approximate") return rows.hits.filter((hit) => hit.tier !== "exact");
  if (name === "exact") return rows.hits.filter((hit) => hit.tier === "exact");
  return rows[name];
}

export function showRequests() {
  const sought = $("search").value.trim().toLowerCase();
  const matching = Object.fromEntries(Object.keys(KINDS).map((name) => [name, ofKind(name).filter((entry) => textOf(entry).includes(sought))]));
  if (sought && !matching[kind].length) kind = Object.keys(KINDS).find((name) => matching[name].length) || kind;
  buttons($("kinds"), LABELS, KINDS[kind], (label) => { kind = Object.keys(KINDS).find((name) => KINDS[name] === label); most = STEP; showRequests(); });
  const shown = matching[kind].slice(0, most);
  $("more-rows").hidden = matching[kind].length <= most;
  const list = $("rows");
  const known = new Map([...list.children].map((node) => [node.dataset.id, node]));
  list.replaceChildren(...shown.map((entry) => {
    const id = `${kind} ${idOf(entry)}`;
    const node = known.get(id) || (entry.asked ? hitItem(entry) : missItem(entry)); // a button's state outlives the next refresh
    node.dataset.id = id;
    return node;
  }));
  $("kind-note").textContent = NOTES[kind];
  $("norows").textContent = sought ? "None of the latest requests has this. Only the latest few hundred are in memory." : NONE[kind];
  $("norows").hidden = shown.length > 0;
}

export async function readRequests(workers) {
  rows = await call("recent");
  const whose = workers > 1 ? `of all ${workers} workers of this gateway` : "of this gateway, since its start";
  $("whose").textContent = `${whose}; other gateways on the same store show their own`;
  showRequests();
}

export function seek(text) {
  $("search").value = text;
  showRequests();
}

$("search").addEventListener("input", () => { most = STEP; showRequests(); });
$("more-rows").addEventListener("click", () => { most += STEP; showRequests(); });
